"""Pages that a store call still touches although their holder has let go: out of use until akv says otherwise (D2)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from akv.errors import EngineContractError
from akv.host.holding import Holdings
from akv.host.pages import Block, Root, WindowPage
from akv.host.window_pool import WindowTable
from akv.units import PageIndex
from akv.values.messages import PagesPerGroup

T = TypeVar("T")


class _Path:
    """Blocks in the tree that are kept together, since one needs those before it. They are let go of with the last name."""

    def __init__(self, holdings: Holdings, blocks: list[Block]) -> None:
        self._holdings = holdings
        holdings.hold(blocks)
        self._holder = holdings.register(blocks, [])
        self._names = 0

    def add(self) -> None:
        self._names += 1

    def drop(self) -> None:
        self._names -= 1
        if not self._names:
            self._holdings.release(self._holder)


class _Name(NamedTuple):
    """One page that was named."""

    #: What nobody finds in the tree meanwhile.
    barred: Block | WindowPage
    #: Gives the page back.
    let_go: Callable[[], None]


class _Found(NamedTuple):
    """A page of full attention, and the block that has it."""

    group: int
    #: Which of the groups of full attention that is.
    at: int
    page: PageIndex
    block: Block


class Quarantine:
    """Neither free nor matched: pages that were named when a holder released them.

    A block in the tree is kept whole, with the blocks before it; these may be matched, but not evicted.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        #: By layer group and page. Two who shared a page may both have named it.
        self._names: dict[tuple[int, int], list[_Name]] = {}

    def keep(self, blocks: Sequence[Block], tables: Sequence[WindowTable], pages: PagesPerGroup) -> None:
        """Keep those of a holder's pages that are named; the holder lets go of everything afterwards.

        Raises EngineContractError, and keeps nothing, if it is named a page that the holder has not.
        """
        if not pages:
            return
        if len(pages) != len(self._holdings.page_counts):
            raise EngineContractError(f"pages of {len(pages)} layer groups for a cache of {len(self._holdings.page_counts)}")
        windows = [
            (table, number)
            for table in tables
            for number in _named(
                table.pool.rule.group,
                pages[table.pool.rule.group],
                {own.page: number for number, own in table.pages.items()},
            ).values()
        ]
        full = [
            _Found(group, at, PageIndex(page), block)
            for at, group in enumerate(self._holdings.full)
            for page, block in _named(group, pages[group], {block.pages[at]: block for block in blocks}).items()
        ]
        for table, number in windows:
            self._keep_window(table, number)
        self._keep_full(full)

    def released(self, pages: PagesPerGroup) -> None:
        """Nothing touches these pages any more. Pages that are not kept are ignored: they were named and given back before."""
        for group, named in enumerate(pages):
            for page in named:
                names = self._names.get((group, page), [])
                if names:
                    name = names.pop()
                    name.barred.barred -= 1
                    name.let_go()
                    if not names:
                        del self._names[group, page]

    def _keep_window(self, table: WindowTable, number: int) -> None:
        one = table.split(number)
        kept = one.pages[number]
        holder = self._holdings.register([], [one])
        self._add(table.pool.rule.group, kept.page, _Name(kept, partial(self._holdings.release, holder)))

    def _keep_full(self, full: Sequence[_Found]) -> None:
        # The holder's blocks in the tree are one path, and the last ones come last: mostly one walk finds it.
        longest: list[Block] = []
        seen: set[int] = set()
        for found in reversed(full):
            if found.block.cached and id(found.block) not in seen:
                longest = _path_to(found.block)
                seen.update(map(id, longest))
        path = _Path(self._holdings, longest) if longest else None
        for group, at, page, block in full:
            if path is not None and block.cached:
                path.add()
                self._add(group, page, _Name(block, path.drop))
            else:
                self._holdings.free.withhold(at, page)
                self._add(group, page, _Name(block, partial(self._holdings.free.restore, at, page)))

    def _add(self, group: int, page: int, name: _Name) -> None:
        name.barred.barred += 1
        self._names.setdefault((group, page), []).append(name)


def _named(group: int, pages: Sequence[int], own: Mapping[PageIndex, T]) -> dict[int, T]:
    """Each named page once, with what the holder has it for."""
    for page in pages:
        if page not in own:
            raise EngineContractError(f"layer group {group}, page {page}: it is not among this sequence's pages")
    return {page: own[PageIndex(page)] for page in pages}


def _path_to(block: Block) -> list[Block]:
    path = [block]
    while path[-1].parent is not None and not isinstance(path[-1].parent, Root):
        path.append(path[-1].parent)
    return path[::-1]
