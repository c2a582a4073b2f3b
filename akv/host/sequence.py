"""A request's pages, from admission to release.

With full attention alone: `commit()` after each pass, `release()` at the end. With window groups each pass is prepared first,
and so is a load from a pool:

    sequence.prepare(upto)         # window pages for the blocks that the pass will write
    ... the pass, with sequence.page_tables() ...
    sequence.commit(upto)          # what the windows left behind is free

    if sequence.prepare_load(resume_at):
        ... the load, with sequence.page_tables() ...
        sequence.commit(resume_at)              # or, when it failed: sequence.rewind(sequence.local_tokens)
"""

from akv.errors import EngineContractError
from akv.host.holding import Holdings
from akv.host.pages import Block
from akv.host.quarantine import Quarantine
from akv.host.reuse import Blocks
from akv.host.window_pool import WindowTable
from akv.plan.tokens import TOKEN_BYTES, Tokens, encode_confirmed
from akv.units import NO_PAGE, PageIndex
from akv.values.messages import PagesPerGroup
from akv.values.scope import Scope


class Hold:
    """Keeps a sequence's pages from being evicted, freed or reused after the sequence itself was released."""

    def __init__(self, holdings: Holdings, quarantine: Quarantine, blocks: list[Block], tables: list[WindowTable]) -> None:
        self._holdings = holdings
        self._quarantine = quarantine
        self._held = blocks
        self._windows = tables
        self._holder = holdings.register(blocks, tables)

    @property
    def released(self) -> bool:
        """Whether it holds nothing any more."""
        return not self._holdings.is_live(self._holder)

    def release(self, quarantined: PagesPerGroup = ()) -> None:
        """Let go of every block. Computed ones stay for reuse until their pages are needed; others are free. Idempotent.

        Only when nobody reads or writes the pages through this holder any more: the pass that used them is over, and the
        connector said so (`finished()` or `cancel()` returned, or the load is terminal). Else take a `hold()` first.

        `quarantined`: pages of each layer group that a store call may still touch, as the connector names them. They are
        neither free nor matched until `PagedCache.pages_released()` names them (D2). Raises EngineContractError if one of them
        is not held here, or if this was released before; nothing is released then.
        """
        if self.released:
            if any(quarantined):
                raise EngineContractError("pages are named too late: they were released and may be another request's by now")
            return
        self._quarantine.keep(self._held, self._windows, quarantined)
        self._holdings.release(self._holder)


class PagedSequence(Hold):
    """The pages of one sequence of tokens. Made by `PagedCache.admit()`."""

    def __init__(
        self,
        holdings: Holdings,
        quarantine: Quarantine,
        blocks: Blocks,
        scope: Scope,
        encoded: bytes | bytearray,
        matched: list[Block],
        begun: list[Block],
        local_tokens: int,
        fresh: list[Block],
        tables: list[WindowTable],
        *,
        reuse: bool,
        booked_blocks: int,
    ) -> None:
        super().__init__(holdings, quarantine, matched + begun + fresh, tables)
        holdings.book(self._holder, booked_blocks)
        self._cut = blocks
        self._tokens_per_block = blocks.tokens_per_block
        self._scope = scope
        #: Its own from here on.
        self._encoded = encoded if isinstance(encoded, bytearray) else bytearray(encoded)
        self._reuse = reuse
        self._table = matched + fresh
        #: The tree's block for each whole block committed so far. Not always ours: when two sequences compute equal tokens
        #: at the same time, the first one's block stands in the tree and ours stays private.
        self._path = list(matched)
        #: Tokens found computed at admission.
        self.local_tokens = local_tokens
        #: A match that ends inside a block: for each layer group the page to copy from, which stays what it is until release,
        #: and the page of ours to copy to, before the first pass. Empty as a rule.
        self.copies = tuple(zip(begun[0].pages, fresh[0].pages, strict=True)) if begun else ()
        #: Tokens whose KV is known to lie in the pages.
        self.computed_tokens = self.local_tokens
        #: Tokens up to which window groups have pages.
        self._prepared = self.local_tokens
        #: Where a load that is prepared, and has not ended, will let the sequence resume.
        self._loading: int | None = None
        #: Holds that were taken of this sequence.
        self._holds: list[Hold] = []

    @property
    def tokens(self) -> int:
        """Tokens known so far: the prompt, and what was appended."""
        return len(self._encoded) // TOKEN_BYTES

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits into the pages."""
        return len(self._table) * self._tokens_per_block

    @property
    def assured_tokens(self) -> int:
        """Tokens up to which `grow()` finds pages whatever others do: what there are pages for, and what is booked."""
        return self.capacity_tokens + self._booked_blocks * self._tokens_per_block

    @property
    def _booked_blocks(self) -> int:
        return self._holdings.rests.get(self._holder, 0)

    def page_tables(self) -> tuple[tuple[PageIndex, ...], ...]:
        """For each layer group, the page of block i at position i: what `Scheduled.pages` and `Request.reserve()` take.

        -1 where a window group has no page: not yet, or not any more. Every other method here may change that.
        """
        tables = dict(zip(self._holdings.full, zip(*(block.pages for block in self._table), strict=True), strict=False))
        for table in self._windows if self._table else ():
            pages = [NO_PAGE] * len(self._table)
            for number, page in table.pages.items():
                pages[number] = page.page
            tables[table.pool.rule.group] = tuple(pages)
        return tuple(tables.get(group, ()) for group in range(len(self._holdings.page_counts)))

    def append(self, tokens: Tokens) -> None:
        """Add confirmed tokens. Raises TokenError for one outside int64; nothing is added then."""
        self._refuse_if_released()
        self._encoded += encode_confirmed(tokens, self.tokens)

    def prepare(self, upto_tokens: int) -> None:
        """Have a page for every block that a pass writes which computes from `computed_tokens` up to here. Idempotent.

        What it takes is booked, so there is always a page. A pass that never ran is prepared again. Without window groups
        there is nothing to do, and the call may be left out. Raises EngineContractError for less than is computed or more than
        there are pages for; with window groups also for more than the cache's `chunk_tokens`, while a prepared load has not
        been ended by `commit()` or `rewind()`, and after `hold()`.
        """
        self._refuse_if_released()
        if not self.computed_tokens <= upto_tokens <= self.capacity_tokens:
            raise EngineContractError(
                f"a pass cannot compute up to {upto_tokens} tokens: {self.computed_tokens} are computed, and there are pages "
                f"for {self.capacity_tokens}"
            )
        self._refuse_if_held()
        if self._windows and self._loading is not None:
            raise EngineContractError(
                f"a load to resume at {self._loading} tokens is prepared: commit({self._loading}) when it is LOADED, rewind() "
                "when it failed"
            )
        for table in self._windows:
            chunk = table.pool.rule.chunk_tokens
            if chunk is not None and upto_tokens - self.computed_tokens > chunk:
                raise EngineContractError(
                    f"{upto_tokens - self.computed_tokens} tokens are to be prepared at once: the cache books windows for "
                    f"chunk_tokens={chunk}"
                )
        for table in self._windows:
            table.fill(range(self.computed_tokens // self._tokens_per_block, self._blocks(upto_tokens)))
        self._prepared = max(self._prepared, upto_tokens)

    def prepare_load(self, tokens: int) -> bool:
        """Have a page for every block that a load writes which lets the sequence resume at `tokens` (W8). Idempotent.

        What is computed stays, with its windows, in case the load fails. False, and nothing was taken, if a window group has
        too few pages for both: compute instead, honour nothing. Right after admission it has enough if nothing was matched,
        or if there are as many pages as its sinks and two windows take. For another number only while no load is under way.

        Then `commit(tokens)` when it is LOADED, which also lets go of what is stale there (W3); `rewind(local_tokens)` when it
        failed and its pages are free. Raises EngineContractError for a place that is no start of a block in what is known, is
        computed already or has no pages, and after `hold()`.
        """
        self._refuse_if_released()
        self._refuse_if_held()
        size = self._tokens_per_block
        known = min(self.tokens, self.capacity_tokens)
        if tokens % size or self.computed_tokens % size or not self.computed_tokens <= tokens <= known:
            raise EngineContractError(
                f"a load cannot resume at {tokens} tokens: {self.computed_tokens} are computed, {known} are known and have "
                f"pages, and blocks of {size} tokens are loaded whole"
            )
        if tokens == self._loading:
            return True
        self.rewind(self.computed_tokens)
        if tokens == self.computed_tokens:
            return True
        for table in self._windows:
            wanted = table.pool.rule.to_load(self.computed_tokens // size, tokens // size)
            if len(table.pages) + sum(map(len, wanted)) > table.booked:
                return False
        for table in self._windows:
            for blocks in table.pool.rule.to_load(self.computed_tokens // size, tokens // size):
                table.fill(blocks)
        self._loading = tokens
        return True

    def commit(self, computed_tokens: int) -> None:
        """Say that the KV of the first `computed_tokens` tokens lies in the pages: whole blocks become reusable by others.

        Call it after the pass that computed them, when the connector's `after_forward()` has returned, or when a load is
        LOADED; never for pages that a failed load may have touched. Window pages that are stale at `computed_tokens` less the
        cache's retention are given back (W1, W4), and are anybody's at once. Raises EngineContractError if more is claimed
        than there are tokens or pages, or than was prepared.
        """
        self._refuse_if_released()
        if not 0 <= computed_tokens <= min(self.tokens, self.capacity_tokens):
            raise EngineContractError(
                f"{computed_tokens} tokens cannot have been computed: the sequence has {self.tokens} and pages for "
                f"{self.capacity_tokens}"
            )
        if self._windows and computed_tokens > self.computed_tokens:
            self._refuse_if_unprepared(computed_tokens)
        self.computed_tokens = max(self.computed_tokens, computed_tokens)
        for table in self._windows:
            table.retire(table.pool.rule.released(self.computed_tokens))
            if self._loading == self.computed_tokens:
                table.retire(table.pool.rule.stale(self._loading))
        if self._loading is not None and self._loading <= self.computed_tokens:
            self._loading = None
        if self._reuse:
            self._offer(self.computed_tokens // self._tokens_per_block)

    def rewind(self, tokens: int) -> None:
        """Go back: what is computed next begins at `tokens`. Window pages of the blocks behind are given back, others stay.

        For a load that failed, and for tokens that are taken back; when nothing reads or writes those pages any more. Raises
        EngineContractError for more than is computed, for less than others may share already (whole blocks that were
        committed), and where a window has been given back.
        """
        self._refuse_if_released()
        shared = len(self._path) * self._tokens_per_block
        if not shared <= tokens <= self.computed_tokens:
            raise EngineContractError(
                f"cannot go back to {tokens} tokens: {self.computed_tokens} are computed, and others may share "
                f"the first {shared}"
            )
        for table in self._windows:
            if any(table.lacking(blocks) for blocks in table.pool.rule.kept(tokens)):
                raise EngineContractError(
                    f"cannot go back to {tokens} tokens: layer group {table.pool.rule.group} has given back what is read there"
                )
        for table in self._windows:
            table.rewind(self._blocks(tokens))
        self.computed_tokens = self._prepared = tokens
        self._loading = None

    def grow(self, capacity_tokens: int) -> bool:
        """Have further pages, up to `capacity_tokens` in all; False if they are not there: nothing was taken then.

        What the sequence booked at admission is there; beyond that only what nobody has booked (D7). False means: wait until
        pages come free, or give a younger sequence's back (`akv.host.youngest_behind()`).
        With window groups, not after `hold()`: EngineContractError.
        """
        self._refuse_if_released()
        self._refuse_if_held()
        blocks = max(len(self._table), self._blocks(capacity_tokens))
        bookings = [max(table.booked, table.pool.rule.pages_for_passes(blocks)) for table in self._windows]
        for table, booking in zip(self._windows, bookings, strict=True):
            if booking - table.booked > table.pool.unbooked:
                return False
        rest, more = self._booked_blocks, blocks - len(self._table)
        fresh = self._holdings.take(more, own=min(rest, more))
        if fresh is None and self._merge():
            fresh = self._holdings.take(more, own=min(rest, more))
        if fresh is None:
            return False
        self._holdings.book(self._holder, max(0, rest - more))
        for table, booking in zip(self._windows, bookings, strict=True):
            table.book(booking)
        self._table.extend(fresh)
        self._held.extend(fresh)
        return True

    def hold(self) -> Hold:
        """A second holder of all present pages, for a reader that outlives the sequence (saves after the request's end).

        With window groups it is the sequence's last act but `release()`: it cannot be prepared for anything afterwards, since
        pages that it would give back are still held.
        """
        self._refuse_if_released()
        self._holdings.hold(self._held)
        hold = Hold(self._holdings, self._quarantine, list(self._held), [table.copy() for table in self._windows])
        self._holds = [*(earlier for earlier in self._holds if not earlier.released), hold]
        return hold

    def release(self, quarantined: PagesPerGroup = ()) -> None:
        """As `Hold.release()`; the page tables are empty afterwards."""
        super().release(quarantined)
        self._table = []

    def _offer(self, blocks: int) -> None:
        """Put the first so many blocks into the tree."""
        for number in range(len(self._path), min(blocks, self._cut.named(self.tokens))):
            own = self._table[number]
            if own.barred:
                return  # named in quarantine by a hold: neither it nor what is behind it is anybody's prefix
            key = self._cut.key(self._encoded, number)
            resident = self._holdings.tree.insert(self._scope, self._path[-1] if self._path else None, key, own)
            if resident is not own:
                if not resident.holders and not self._holdings.unbooked:
                    return  # to hold it beside our own would take a block that somebody booked; the next commit tries again
                # Held although we do not read it: what we insert behind it must not outlive it (the tree's invariant). And
                # whoever holds that too has to hold this as well.
                for holder in (self, *(hold for hold in self._holds if not hold.released)):
                    self._holdings.hold([resident])
                    holder._held.append(resident)
            for table in self._windows:
                table.offer(number, resident)
            self._path.append(resident)

    def _merge(self) -> bool:
        """Give back pages of blocks that were computed twice and that nobody else holds any more; whether there were any.

        Equal tokens that two sequences compute at the same time are two blocks, and the second sequence holds both. Without
        this it could wait for a page that it holds itself. Our page stays where it is, since it may be read or be in a table:
        the block in the tree takes it over.
        """
        twice = [
            (number, own, resident)
            for number, (own, resident) in enumerate(zip(self._table, self._path, strict=False))
            if resident is not own and resident.holders == 1 and not own.barred and not resident.barred
        ]
        for number, own, resident in twice:
            own.pages, resident.pages = resident.pages, own.pages
            self._table[number] = resident
            self._held.remove(own)
            self._holdings.let_go([own])
        return bool(twice)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._tokens_per_block)

    def _refuse_if_released(self) -> None:
        if self.released:
            raise EngineContractError("this sequence was released: its pages may hold another request's KV")

    def _refuse_if_held(self) -> None:
        if any(table.frozen for table in self._windows):
            raise EngineContractError(
                "a hold was taken of this sequence: its window pages are not its own to give back any more"
            )

    def _refuse_if_unprepared(self, computed_tokens: int) -> None:
        if self._loading is not None and computed_tokens != self._loading:
            raise EngineContractError(
                f"{computed_tokens} tokens cannot have been computed: a load to resume at {self._loading} is prepared"
            )
        if computed_tokens > (self._loading or self._prepared):
            raise EngineContractError(
                f"{computed_tokens} tokens cannot have been computed: prepare() gave window pages for {self._prepared}"
            )
