"""A paged KV cache for engines that have none: who holds which page, and which computed prefix can be reused (H1).

It books pages, it moves no bytes. In groups of full attention a sequence holds all its blocks from admission to release. In
window groups it holds what a pass reads and writes, out of a count that is booked for it (`booking.py`).
"""

from collections.abc import Sequence

from akv.errors import EngineContractError, SettingsError
from akv.host.booking import Attention, WindowRule
from akv.host.check import inconsistencies
from akv.host.holding import Holdings
from akv.host.pages import Block
from akv.host.quarantine import Quarantine
from akv.host.reuse import Blocks, resumable_blocks
from akv.host.sequence import PagedSequence
from akv.host.trimming import LocalReuse, check_local_reuse
from akv.host.window_pool import WindowPool, WindowTable
from akv.plan.tokens import TOKEN_BYTES, Tokens, encode_confirmed
from akv.units import PageIndex
from akv.values.messages import PagesPerGroup
from akv.values.scope import EMPTY_SCOPE, Scope
from akv.values.settings import DEFAULT_REWIND_TOKENS

_WHOLE_BLOCKS = LocalReuse()


class PagedCache:
    """The pages of every layer group, and a radix tree of the blocks that were computed in them.

    All methods are synchronous and belong to one owner (the engine's loop); none of them waits or calls back.
    """

    def __init__(
        self,
        tokens_per_block: int,
        page_counts: Sequence[int],
        groups: Sequence[Attention] | None = None,
        *,
        retention_tokens: int | None = None,
        chunk_tokens: int | None = None,
        lookahead_tokens: int = 0,
        local_reuse: LocalReuse = _WHOLE_BLOCKS,
    ) -> None:
        """`page_counts`: pages in each layer group's cache, in the order of the layout.

        `groups`: how far back each group reads, `layout.groups` say; None: all of them without bound. `retention_tokens`: how
        far behind the window its pages stay (W4); None: the larger of akv's default rewind and T, which suits a server that
        saves to a pool. With another rewind pass that.
        `chunk_tokens`: tokens of one sequence that are prepared and not committed at most, so what one pass computes of it (of
        several passes, where they are prepared ahead). It bounds what a window group needs; None for no bound: then windows
        are booked whole, like full attention.
        `lookahead_tokens`: L, tokens behind a block that the KV of a drafter in it depends on: `EngineCapabilities.lookahead`.
        A block is shared only with sequences that have these in common too, as its name in the pool says (K2).

        `local_reuse`: where a match may end, `akv.host.local_reuse("off", reads=True)` say.

        Raises SettingsError (fault of the embedding engine).
        """
        if tokens_per_block < 1:
            raise SettingsError("tokens_per_block", tokens_per_block, "a block holds at least one token", "Use 32, say.")
        if not page_counts or min(page_counts) < 1:
            raise SettingsError("page_counts", tuple(page_counts), "every group has a page", "Count the pages of each group.")
        if retention_tokens is None:
            retention_tokens = max(DEFAULT_REWIND_TOKENS, tokens_per_block)
        if retention_tokens < 0:
            raise SettingsError("retention_tokens", retention_tokens, "there are no fewer tokens", "Use 0 for none.")
        if chunk_tokens is not None and chunk_tokens < 1:
            raise SettingsError("chunk_tokens", chunk_tokens, "a pass computes at least one token", "Use None for no bound.")
        if lookahead_tokens < 0:
            raise SettingsError("lookahead_tokens", lookahead_tokens, "there are no fewer tokens", "Use 0 for no drafter.")
        check_local_reuse(local_reuse, tokens_per_block)
        self._local_reuse = local_reuse
        self.tokens_per_block = tokens_per_block
        self.lookahead_tokens = lookahead_tokens
        self.page_counts = tuple(page_counts)
        #: Tokens behind the window for which window pages stay: what `EngineCapabilities` is to declare.
        self.window_retention_tokens = retention_tokens
        windows = _windows(groups or (), self.page_counts)
        rules = [
            WindowRule(group, window, sinks, tokens_per_block, retention_tokens, chunk_tokens)
            for group, (window, sinks) in windows.items()
        ]
        self._holdings = Holdings(page_counts, rules)
        self._quarantine = Quarantine(self._holdings)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages of each group that hold nothing."""
        return tuple(map(len, self.free_page_lists()))

    def free_page_lists(self) -> tuple[tuple[PageIndex, ...], ...]:
        """The pages of each group that hold nothing: whatever is written into them harms nobody. For tests."""
        return self._holdings.free_pages()

    @property
    def available_pages(self) -> tuple[int, ...]:
        """Pages of each group that an admission can get at this moment: what nobody holds and nobody has booked."""
        unbooked = {pool.rule.group: pool.unbooked for pool in self._holdings.pools}
        return tuple(
            unbooked[group] if group in unbooked else free + self._holdings.tree.idle - self._holdings.booked
            for group, free in enumerate(self.free_pages)
        )

    @property
    def available_blocks(self) -> int:
        """Blocks of full attention that an admission can get at this moment: free, or cached and held by nobody; and booked
        by nobody (D7).
        """
        return self._holdings.unbooked

    @property
    def cached_blocks(self) -> int:
        """Blocks that later sequences can reuse, held or not."""
        return self._holdings.tree.blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that the KV of so many tokens takes."""
        return -(-tokens // self.tokens_per_block)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens fits into the empty cache: if not, waiting for pages is in vain."""
        blocks = self.blocks_for(tokens)
        return all(blocks <= self.page_counts[group] for group in self._holdings.full) and all(
            pool.rule.pages_for_passes(blocks) <= pool.count for pool in self._holdings.pools
        )

    def match(self, tokens: Tokens, scope: Scope = EMPTY_SCOPE) -> int:
        """How many tokens `admit()` would find computed at this moment. Takes no hold.

        At most floor((n - 1)/T) blocks count, so at least one token is left to compute: its logits are what is asked for. With
        a lookahead of L tokens at most floor((n - L)/T): behind these nobody knows yet what a drafter's KV depends on.
        With window groups it is the latest end at which they have their sinks and their window (W2), possibly none.
        A multiple of T, since pages are shared whole, and offers start on blocks (L1); unless `local_reuse` lets it end inside
        a block, whose page is copied then (`PagedSequence.copies`).
        Raises TokenError for a token outside int64.
        """
        return self._match(encode_confirmed(tokens, 0), scope)[1]

    def admit(
        self,
        tokens: Tokens,
        capacity_tokens: int,
        scope: Scope = EMPTY_SCOPE,
        *,
        reuse: bool = True,
        booked_tokens: int = 0,
    ) -> PagedSequence | None:
        """Have pages for the first `capacity_tokens` tokens of a sequence; None if they are not there: nothing was taken then.

        What is already computed is shared, the rest comes from free pages and, if these are short, from evicted blocks,
        least recently used leaf first. `reuse=False` neither shares nor leaves anything for others (cold runs), and so does a
        scope whose media nobody has digested (K5): equal placeholders may stand for different pictures.

        `booked_tokens`: up to where `PagedSequence.grow()` is sure to find pages, if that is further. What lies between is
        booked, a count and not pages, and nobody else gets it, growing sequences included (D7). Book the whole prompt of
        whoever loads a part of it: else parked loads may take each other the pages for the rest, for ever.

        In window groups a count is booked, and pages come with `PagedSequence.prepare()`, which therefore never fails.
        None says nothing about the future: `fits()` does. Raises EngineContractError for an empty sequence or one that is
        longer than what it is admitted for, TokenError for a token outside int64.
        """
        encoded = encode_confirmed(tokens, 0)  # a megabyte of a long prompt, and each copy of it holds the loop
        length = len(encoded) // TOKEN_BYTES
        assured = max(capacity_tokens, booked_tokens)
        if not 0 < length <= assured:
            raise EngineContractError(f"a sequence of {length} tokens cannot be admitted for {assured}")
        reuse = reuse and scope.media is not None
        chain, local_tokens = self._match(encoded, scope) if reuse else ([], 0)
        whole = local_tokens // self.tokens_per_block
        matched, begun = chain[:whole], chain[whole:]
        blocks, all_blocks = max(self.blocks_for(capacity_tokens), len(chain)), self.blocks_for(assured)
        bookings = [_booking(pool, all_blocks, len(matched)) for pool in self._holdings.pools]
        if any(booking > pool.unbooked for booking, pool in zip(bookings, self._holdings.pools, strict=True)):
            return None
        fresh = self._take(matched, begun, blocks - whole, all_blocks - blocks)
        if fresh is None and begun:
            begun, local_tokens = [], whole * self.tokens_per_block
            fresh = self._take(matched, begun, blocks - whole, all_blocks - blocks)
        if fresh is None:
            return None
        tables = [WindowTable(pool, booked) for pool, booked in zip(self._holdings.pools, bookings, strict=True)]
        for table in tables:
            for needed in table.pool.rule.needed(len(matched)):
                table.share(needed, matched)
        return PagedSequence(
            self._holdings,
            self._quarantine,
            Blocks(self.tokens_per_block, self.lookahead_tokens),
            scope,
            encoded,
            matched,
            begun,
            local_tokens,
            fresh,
            tables,
            reuse=reuse,
            booked_blocks=all_blocks - blocks,
        )

    def pages_released(self, pages: PagesPerGroup) -> None:
        """Nothing touches these pages any more: what `PagesReleased.pages` names, for each layer group.

        Pages that are not in quarantine are ignored: akv may release pages before their sequence is. Two sequences that shared
        a page may both have released it as quarantined; each of them needs a call then.
        """
        self._quarantine.released(pages)

    def evict_idle(self) -> int:
        """Forget every cached block that nobody holds; returns how many. For new weights, and for measuring cold runs."""
        idle = self._holdings.tree.idle
        self._holdings.evict(idle)
        for pool in self._holdings.pools:
            pool.forget_idle()  # those too whose blocks somebody holds
        return idle

    def check(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well. Walks everything: for tests and for post-mortems."""
        return inconsistencies(self._holdings)

    def _take(self, matched: list[Block], begun: list[Block], blocks: int, beside: int) -> list[Block] | None:
        """Hold what is shared and copied from, and take the rest; None, and nothing is held, if that is not there.

        Without `begun` it may be: else a sequence as large as the cache would wait for ever for the page that it copies from.
        """
        shared = matched + begun
        self._holdings.hold(shared)  # before taking: what is about to be shared must not be evicted for the rest
        fresh = self._holdings.take(blocks, beside=beside)
        if fresh is None:
            self._holdings.let_go(shared)
        return fresh

    def _match(self, encoded: bytes | bytearray, scope: Scope) -> tuple[list[Block], int]:
        """The blocks of a match, and its tokens: fewer than these blocks hold if it ends inside the last one (P3)."""
        blocks, size = Blocks(self.tokens_per_block, self.lookahead_tokens), self.tokens_per_block
        length = len(encoded) // TOKEN_BYTES
        most = min((length - 1) // size, blocks.named(length))
        chain = self._holdings.tree.match(scope, [blocks.key(encoded, number) for number in range(most)])
        tokens = self._local_reuse.trimmed(len(chain) * size, size)
        if self._holdings.pools:  # a window's page is read whole from where the sequence resumes
            end = resumable_blocks(chain[: tokens // size], [pool.rule for pool in self._holdings.pools])
            tokens = self._local_reuse.aligned(end * size, size)
        return chain[: self.blocks_for(tokens)], tokens


def _booking(pool: WindowPool, capacity_blocks: int, local_blocks: int) -> int:
    """Pages of a window group for one sequence; those for a load beside a local match only if there are so many at all."""
    for_load = pool.rule.pages_for_load(capacity_blocks, local_blocks)
    return max(pool.rule.pages_for_passes(capacity_blocks), min(for_load, pool.count))


def _windows(groups: Sequence[Attention], page_counts: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """W and S of each window group, by its index."""
    if groups and len(groups) != len(page_counts):
        raise SettingsError("groups", len(groups), f"there are pages of {len(page_counts)} layer groups", "Give one for each.")
    for index, group in enumerate(groups):
        window, sinks = group.window_tokens, group.sink_tokens
        if window < 0 or sinks < 0 or (sinks and not window):
            raise SettingsError(
                f"groups[{index}]",
                (window, sinks),
                "a window holds at least one token, and full attention has no sinks",
                "Use window_tokens=0 for full attention.",
            )
    return {index: (group.window_tokens, group.sink_tokens) for index, group in enumerate(groups) if group.window_tokens}
