"""Pages that a get did not deliver: for a while nobody asks for them again (L8).

The pool goes on naming what a dead process held, for about 11 seconds. Without this every request that shares the prompt
would wait for a load that cannot end well.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from akv.values.messages import BadPage, GroupPages

#: Pages remembered in each layer group, those that failed last. What a dead holder leaves is found batch by batch, as loads
#: fail, so it never comes near.
MOST_PAGES = 16_384


class NegativeKeys:
    """Whose get failed lately. Named by group and block hash, which both halves know: a shard's key would be known to its
    rank alone, and a block without it is of no use to any (L2).
    """

    def __init__(self, groups: int, ttl_s: float, most: int = MOST_PAGES) -> None:
        """`ttl_s`: seconds for which a page counts as missing. `most`: pages remembered in each of `groups` groups."""
        self._ttl_s = ttl_s
        self._most = most
        #: Of each group, by hash, in the order of their ends: until when, and whether a put may end it sooner.
        self._pages: list[OrderedDict[bytes, tuple[float, bool]]] = [OrderedDict() for _ in range(groups)]

    def __len__(self) -> int:
        return sum(map(len, self._pages))

    def failed(self, pages: Iterable[BadPage], now: float) -> None:
        """The pool did not deliver these."""
        for page in pages:
            group = self._pages[page.group]
            # Behind the others: those in front end first.
            group.pop(page.hash, None)
            group[page.hash] = (now + self._ttl_s, not page.named)
            while len(group) > self._most:
                group.popitem(last=False)

    def clear(self) -> None:
        """Pages have other names now, of which nothing is known."""
        for group in self._pages:
            group.clear()

    def stored(self, columns: Iterable[GroupPages]) -> None:
        """A put of ours took these pages, so they can be had again.

        Not those that the pool named all along: a put of such a key answers OK and changes nothing, the first value stays.
        """
        for column in columns:
            group = self._pages[column.group]
            for block_hash in column.hashes if group else ():
                if group.get(block_hash, (0.0, False))[1]:
                    del group[block_hash]

    def are_bad(self, group: int, hashes: Sequence[bytes], now: float) -> list[bool]:
        """For each page of a layer group whether it counts as missing at this moment."""
        pages = self._pages[group]
        while pages and next(iter(pages.values()))[0] <= now:
            pages.popitem(last=False)
        return [block_hash in pages for block_hash in hashes] if pages else [False] * len(hashes)
