"""What is known to be in the pool, so that a prefix, or an end, which many requests share is saved once (S13)."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import compress

from akv.values.messages import GroupPages

#: Hashes kept, the most recently seen: 64 Ki of 16 bytes are about 8 MiB of Python objects and two million tokens at T = 32.
#: Window pages take no room of their own: they are few, and of blocks whose pages of full attention are saved too.
MOST_HASHES = 65_536

#: Stands for all groups of full attention: their pages of a block are saved together.
FULL = -1
_FULL_BIT = 1


class KnownHashes:
    """What saves brought to the pool and loads brought from it. Knowledge ages: the pool evicts without telling."""

    def __init__(self, most: int = MOST_HASHES) -> None:
        self._most = most
        #: Of each block, by its hash, the groups whose page is there, as bits.
        self._groups: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block's pages of full attention are known."""
        return self._groups.get(block_hash, 0) & _FULL_BIT != 0

    def has(self, block_hash: bytes, group: int) -> bool:
        """Whether the block's page of this window group is known, or those of full attention."""
        return self._groups.get(block_hash, 0) & _bit(group) != 0

    def add(self, hashes: Iterable[bytes], group: int = FULL) -> None:
        """The pool has these blocks' pages; beyond `most`, the blocks that were not seen for longest are forgotten."""
        bit = _bit(group)
        for seen in hashes:
            # Taken out and put back: behind the others.
            self._groups[seen] = self._groups.pop(seen, 0) | bit
        while len(self._groups) > self._most:
            self._groups.popitem(last=False)

    def put(self, columns: GroupPages, stored: Collection[int], refused: Collection[int], group: int = FULL) -> None:
        """A save of these pages ended, those of a window group or of full attention. What the pool refused it may have lost
        since others stored it: one that was asked for again was known, and has gone.
        """
        self.add(compress(columns.hashes, [block in stored for block in columns.blocks]), group)
        if refused:
            self.forget_pages(compress(columns.hashes, [block in refused for block in columns.blocks]), group)

    def clear(self) -> None:
        """The pool may have been lost: a generation ends."""
        self._groups.clear()

    def forget(self, hashes: Iterable[bytes]) -> None:
        """These blocks may be gone, in every group."""
        for lost in hashes:
            self._groups.pop(lost, None)

    def forget_pages(self, hashes: Iterable[bytes], group: int) -> None:
        """These blocks' pages of one window group may be gone, or those of full attention."""
        bit = _bit(group)
        for lost in hashes:
            # Most of what a lookup misses was never stored, and is not here.
            known = self._groups.get(lost, 0)
            if known == bit:
                del self._groups[lost]
            elif known & bit:
                self._groups[lost] = known - bit


def _bit(group: int) -> int:
    return _FULL_BIT << (group - FULL)
