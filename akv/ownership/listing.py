"""Which of a request's pages a pass, or its end, lists for saving (S1, S2, S8, S12, S13). Changes no request and no mark."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from akv.ownership.known_hashes import KnownHashes
from akv.ownership.marks import UNLIMITED
from akv.ownership.request_record import RequestRecord
from akv.plan.ending import WindowPages
from akv.plan.hashing import Chain
from akv.units import NO_PAGE
from akv.values.messages import GroupPages, SaveOrder, select_pages


class Listing:
    """Makes save orders. Each has a number of its own from `ids`, which numbers requests and loads too."""

    def __init__(self, ids: Iterator[int], known: KnownHashes, groups: int, windows: Collection[int]) -> None:
        self._ids = ids
        self._known = known
        #: The layer groups that forget nothing: the marks of blocks follow them.
        self.full = tuple(group for group in range(groups) if group not in windows)

    def blocks(
        self, record: RequestRecord, end: int, tables: Sequence[Sequence[int]], first: int, now: float
    ) -> SaveOrder | None:
        """`some_blocks` without a bound."""
        return self.some_blocks(record, end, tables, first, now, UNLIMITED)[1]

    def some_blocks(
        self, record: RequestRecord, end: int, tables: Sequence[Sequence[int]], first: int, now: float, most: int
    ) -> tuple[int, SaveOrder | None]:
        """What a pass would have to save of this request, of the first `most` blocks below `end` that are open and have their
        pages; and how many blocks these were. Changes no mark (S2).

        `tables` are the page tables of each group from block `first` on; those of window groups are not looked at. A block
        that lacks a page in a group is not listed, since a lookup could never count it (L2), and does not count; one that the
        pool is known to hold is not listed either.
        """
        if not self.full:
            return 0, None
        with_pages = (
            block
            # Bounded too where many blocks have no page: those are only passed over.
            for block in record.marks.to_offer(end, now, 16 * most)
            if block >= first and all(_page(tables[group], block - first) != NO_PAGE for group in self.full)
        )
        blocks = list(islice(with_pages, most))
        looked_at = len(blocks)
        if blocks:
            chain = hashes_of(record.chain, blocks)
            blocks = [block for block in blocks if chain[block] not in self._known]
        if not blocks:
            return looked_at, None
        return looked_at, self._order(record, self._columns(chain, blocks, tables, first))

    def windows(
        self, record: RequestRecord, columns: Sequence[WindowPages], *, snapshot: bool, again: bool = False
    ) -> SaveOrder | None:
        """What is to be saved of the window pages at an end of this request: those that were not handed over before, and that
        the pool is not known to hold (S13). `again`: those too, to be asked for and put where missing (S8).
        """
        groups = []
        any_known = False
        for column in map(record.windows.open, columns):
            hashes = self._hashes(record, column)
            known = [self._known.has(block_hash, column.group) for block_hash in hashes]
            any_known = any_known or any(known)
            pages = GroupPages(column.group, column.blocks, column.pages, hashes)
            if not again:
                pages = select_pages(pages, [not there for there in known])
            if pages.blocks:
                groups.append(pages)
        if not groups:
            return None
        probe_first = record.windows.loaded or (again and any_known)
        return self._order(record, tuple(groups), window=True, snapshot=snapshot, probe_first=probe_first)

    def known(self, record: RequestRecord, columns: WindowPages) -> list[int]:
        """The blocks of these window pages that the pool is known to hold (S13)."""
        hashes = self._hashes(record, columns)
        return [block for block, name in zip(columns.blocks, hashes, strict=True) if self._known.has(name, columns.group)]

    @staticmethod
    def _hashes(record: RequestRecord, columns: WindowPages) -> tuple[bytes, ...]:
        chain = hashes_of(record.chain, columns.blocks) if columns.blocks else {}
        return tuple(chain[block] for block in columns.blocks)

    def again(self, record: RequestRecord, end: int, tables: Sequence[Sequence[int]]) -> SaveOrder | None:
        """The blocks below `end` that are stored, to be asked for and put where missing (S8). `tables` begin at block 0."""
        blocks = [
            block
            for block in range(end)
            if record.marks.is_stored(block) and all(_page(tables[group], block) != NO_PAGE for group in self.full)
        ]
        if not blocks or not self.full:
            return None
        return self._order(record, self._columns(hashes_of(record.chain, blocks), blocks, tables, 0), probe_first=True)

    def _columns(
        self, chain: Mapping[int, bytes], blocks: Sequence[int], tables: Sequence[Sequence[int]], first: int
    ) -> tuple[GroupPages, ...]:
        hashes = tuple(chain[block] for block in blocks)
        return tuple(
            GroupPages(group, tuple(blocks), tuple(int(tables[group][block - first]) for block in blocks), hashes)
            for group in self.full
        )

    def _order(
        self,
        record: RequestRecord,
        groups: tuple[GroupPages, ...],
        *,
        window: bool = False,
        snapshot: bool = False,
        probe_first: bool = False,
    ) -> SaveOrder:
        return SaveOrder(
            save_id=next(self._ids),
            request_id=record.request_id,
            incarnation=record.incarnation,
            groups=groups,
            window=window,
            snapshot=snapshot,
            probe_first=probe_first,
        )


def hashes_of(chain: Chain, blocks: Sequence[int]) -> dict[int, bytes]:
    """The hash of each of these blocks, which are ascending, and of those between them."""
    # From the first of the blocks on and not from the sequence's first: a pass of a long request has a few new blocks.
    return dict(enumerate(chain.hashes(blocks[0], blocks[-1] + 1), blocks[0]))


def _page(table: Sequence[int], index: int) -> int:
    return table[index] if index < len(table) else NO_PAGE
