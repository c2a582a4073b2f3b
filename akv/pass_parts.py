"""What an engine says of one request's part in a pass: refused where it cannot be, then cut to what may be saved of it."""

from collections.abc import Sequence, Sized
from typing import NamedTuple, NoReturn

from akv.errors import EngineContractError
from akv.ownership.request_record import RequestRecord
from akv.plan.ending import Ending, WindowPages
from akv.plan.save_bounds import check_scheduled, closing_blocks, savable_blocks
from akv.units import NO_PAGE
from akv.values.layout import Layout
from akv.values.messages import PassPlan
from akv.values.requests import Scheduled


class Part(NamedTuple):
    """What a plan keeps of one scheduled request until it ends."""

    record: RequestRecord
    #: Whose pages it computes into: the request may have been preempted by the time the pass ended.
    incarnation: int
    #: Tokens that have KV before the pass, and once it ran.
    before: int
    computed: int
    #: Tokens that may have KV once it ran: drafts that are accepted move the window on, and the engine releases pages by that.
    history: int
    #: Blocks that are whole then, and whose hashes are known.
    end: int
    #: The first block that was not saved yet, and the pages from there on of each layer group: what `finish` may still have to
    #: save. Empty for window groups.
    first: int
    tail: tuple[tuple[int, ...], ...]
    #: The window pages that the request holds behind this pass: what `finish` may have to save.
    held: tuple[WindowPages, ...]
    #: Whether this pass completes the prompt's chain (W3), and the window pages that it copies then.
    closes: bool
    closing: tuple[WindowPages, ...]

    @property
    def counts(self) -> bool:
        """Whether the pages that the pass computed into are still the request's."""
        return self.record.incarnation == self.incarnation and self.record.is_open


class Planned(NamedTuple):
    """An open plan."""

    plan: PassPlan
    parts: tuple[Part, ...]


class PassParts:
    """Reads the parts of passes for one layout."""

    def __init__(
        self, layout: Layout, page_counts: Sequence[int], ending: Ending, *, saves: bool, save_generated: bool
    ) -> None:
        self._tokens_per_block = layout.tokens_per_block
        self._page_counts = page_counts
        self._ending = ending
        self._windows = frozenset(group.group for group in ending.groups)
        self._saves = saves
        self._save_generated = save_generated

    def kept(self, record: RequestRecord, computed: int) -> int:
        """Tokens whose KV may be published, of `computed` ones."""
        if not self.saves(record):
            return 0
        # Where prompts alone are saved their chain ends before their lookahead, whatever was generated since (K2, S1).
        return computed if self._save_generated else min(computed, max(0, record.prompt_tokens - self._ending.lookahead))

    def saves(self, record: RequestRecord) -> bool:
        """Whether anything of this request is published: by this role, and of a request that may be (K5, X3)."""
        return self._saves and record.excluded is None

    def read(self, record: RequestRecord, item: Scheduled, ahead: Sequence[Part] = ()) -> Part:
        """One request's part. `ahead`: its parts in earlier plans that have not ended, where passes are planned ahead.

        Raises EngineContractError, naming the request, for one that cannot be.
        """
        self._check(record, item, ahead)
        before, tokens = int(item.computed_before), int(item.tokens)
        computed = before + tokens
        history = computed + int(item.draft_tokens)
        # Computed, and confirmed (K6), and wanted: the least of the three.
        end = min(
            savable_blocks(before, 0, tokens, self._tokens_per_block),
            closing_blocks(self.kept(record, record.chain.length), self._tokens_per_block),
        )
        first = record.marks.mark
        # Of what is not saved no page is looked at: those of a dummy request need not be its own.
        last = -(-computed // self._tokens_per_block) if record.excluded is None else first
        tail = tuple(
            () if group in self._windows else self._pages(record, group, table, first, last)
            for group, table in enumerate(item.pages)
        )
        saves = self.saves(record)
        closes = saves and not record.windows.closed and self._completes(record, before, computed, ahead)
        closing: tuple[WindowPages, ...] = ()
        held: tuple[WindowPages, ...] = ()
        if self._windows and saves:
            if closes:
                began_at = record.windows.began_at
                if began_at is None:
                    began_at = min((part.before for part in ahead), default=before)
                resumed_at = began_at // self._tokens_per_block
                closing = self._ending.closing(record.prompt_tokens, before, resumed_at, item.pages)
            held = self._ending.held(computed, history, item.pages)
            for columns in (*closing, *held):
                self.check_pages(record, columns.group, columns.pages, columns.blocks)
        return Part(record, record.incarnation, before, computed, history, end, first, tail, held, closes, closing)

    def _completes(self, record: RequestRecord, before: int, computed: int, ahead: Sequence[Part]) -> bool:
        """Whether this is the first pass behind which the prompt's chain has KV (W3)."""
        end = record.prompt_blocks * self._tokens_per_block
        first = record.windows.began_at is None and not ahead
        return 0 < end <= computed and (before < end or first)

    def _check(self, record: RequestRecord, item: Scheduled, ahead: Sequence[Part]) -> None:
        check_scheduled(record.request_id, item.computed_before, item.tokens, item.draft_tokens)
        if record.load is not None:
            raise EngineContractError(
                f"request {record.request_id!r} is scheduled while its load is under way: its pages are the connector's; "
                "schedule it once Load.wait() returned or completed() delivered its LoadCompleted"
            )
        # What passes that are planned will compute, accepted drafts with it, counts as there.
        valid_to = None if record.valid_to is None else max([record.valid_to, *(part.history for part in ahead)])
        if valid_to is not None and item.computed_before > valid_to:
            raise EngineContractError(
                f"request {record.request_id!r} is scheduled with computed_before = {item.computed_before}, but its load did "
                f"not deliver and its pages hold KV for {valid_to} tokens only: schedule it from there, or report a "
                "longer local match with lookup(local_tokens)"
            )
        tables: object = item.pages
        found = len(tables) if isinstance(tables, Sized) else 0
        if found != len(self._page_counts):
            raise EngineContractError(
                f"request {record.request_id!r}: {found} page tables for a layout of {len(self._page_counts)} layer groups: "
                "`pages` holds one for each"
            )

    def _pages(self, record: RequestRecord, group: int, table: Sequence[int], first: int, last: int) -> tuple[int, ...]:
        """The pages of blocks [first, last), every one that this pass or `finish` may list: each in the cache, none twice."""
        # Blocks below the mark are stored or on their way, so their pages are not looked at: a pass of many long decoding
        # requests costs a few entries for each.
        pages = tuple(map(int, table[first:last]))
        self.check_pages(record, group, pages, range(first, last))
        return pages

    def check_pages(self, record: RequestRecord, group: int, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """Refuse pages that are not in the cache, or belong to two of the blocks."""
        held = [page for page in pages if page != NO_PAGE] if NO_PAGE in pages else pages
        count = self._page_counts[group]
        if held and not (min(held) >= 0 and max(held) < count and len(set(held)) == len(held)):
            self._refuse_pages(record, group, pages, blocks)

    def _refuse_pages(self, record: RequestRecord, group: int, pages: Sequence[int], blocks: Sequence[int]) -> NoReturn:
        at = next(
            index
            for index, page in enumerate(pages)
            if page != NO_PAGE and (not 0 <= page < self._page_counts[group] or page in pages[index + 1 :])
        )
        page = pages[at]
        # Two blocks of one page: at least one of them would be stored with the other's KV.
        why = (
            "is also listed for a later block; each block of a request has a page of its own"
            if 0 <= page < self._page_counts[group]
            else f"is not in the cache, which has {self._page_counts[group]} pages"
        )
        raise EngineContractError(f"request {record.request_id!r}, block {blocks[at]}, group {group}: page {page} {why}")
