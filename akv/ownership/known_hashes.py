"""Hashes of blocks that are known to be in the pool, so that a prefix which many requests share is saved once (S13)."""

from collections import OrderedDict
from collections.abc import Iterable

#: Hashes kept, the most recently seen: 64 Ki of 16 bytes are about 8 MiB of Python objects and two million tokens at T = 32.
MOST_HASHES = 65_536


class KnownHashes:
    """What saves brought to the pool and loads brought from it. Knowledge ages: the pool evicts without telling."""

    def __init__(self, most: int = MOST_HASHES) -> None:
        self._most = most
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._hashes

    def add(self, hashes: Iterable[bytes]) -> None:
        """These blocks are in the pool; beyond `most`, those that were not seen for longest are forgotten."""
        for seen in hashes:
            self._hashes[seen] = None
            self._hashes.move_to_end(seen)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """The pool may have been lost: a generation ends."""
        self._hashes.clear()

    def forget(self, hashes: Iterable[bytes]) -> None:
        """These blocks may be gone."""
        for lost in hashes:
            self._hashes.pop(lost, None)
