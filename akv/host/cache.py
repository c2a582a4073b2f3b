"""A paged KV cache for engines that have none: who holds which page, and which computed prefix can be reused (H1).

It books pages, it moves no bytes. Full attention: a sequence holds all its blocks from admission to release.
"""

from collections.abc import Sequence

from akv.errors import EngineContractError, SettingsError
from akv.host.holding import Holdings
from akv.host.pages import Block
from akv.host.sequence import PagedSequence
from akv.plan.tokens import TOKEN_BYTES, Tokens, encode_confirmed
from akv.values.scope import EMPTY_SCOPE, Scope


class PagedCache:
    """The pages of every layer group, and a radix tree of the blocks that were computed in them.

    All methods are synchronous and belong to one owner (the engine's loop); none of them waits or calls back.
    """

    def __init__(self, tokens_per_block: int, page_counts: Sequence[int]) -> None:
        """`page_counts`: pages in each layer group's cache, in the order of the layout. Raises SettingsError."""
        if tokens_per_block < 1:
            raise SettingsError("tokens_per_block", tokens_per_block, "a block holds at least one token", "Use 32, say.")
        if not page_counts or min(page_counts) < 1:
            raise SettingsError("page_counts", tuple(page_counts), "every group has a page", "Count the pages of each group.")
        self.tokens_per_block = tokens_per_block
        self.page_counts = tuple(page_counts)
        self._holdings = Holdings(page_counts)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages of each group that hold nothing."""
        return self._holdings.free.counts()

    @property
    def available_blocks(self) -> int:
        """Blocks that an admission can get at this moment: free, or cached and held by nobody."""
        return self._holdings.available

    @property
    def cached_blocks(self) -> int:
        """Blocks that later sequences can reuse, held or not."""
        return self._holdings.tree.blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that the KV of so many tokens takes."""
        return -(-tokens // self.tokens_per_block)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens fits into the empty cache: if not, waiting for pages is in vain."""
        return self.blocks_for(tokens) <= min(self.page_counts)

    def match(self, tokens: Tokens, scope: Scope = EMPTY_SCOPE) -> int:
        """How many tokens `admit()` would find computed at this moment, a multiple of T. Takes no hold.

        At most floor((n - 1)/T) blocks count, so at least one token is left to compute: its logits are what is asked for.
        A match that ends inside a block is rounded down to its start: pages are shared whole, and offers start on blocks (L1).
        Raises TokenError for a token outside int64.
        """
        return len(self._match(bytes(encode_confirmed(tokens, 0)), scope)) * self.tokens_per_block

    def admit(
        self, tokens: Tokens, capacity_tokens: int, scope: Scope = EMPTY_SCOPE, *, reuse: bool = True
    ) -> PagedSequence | None:
        """Book pages for a sequence that will grow to `capacity_tokens`; None if they are not there: nothing was taken then.

        What is already computed is shared, the rest comes from free pages and, if these are short, from evicted blocks,
        least recently used leaf first. `reuse=False` neither shares nor leaves anything for others (cold runs).
        None says nothing about the future: `fits()` does. Raises EngineContractError for an empty sequence or a capacity
        below its length, TokenError for a token outside int64.
        """
        encoded = bytes(encode_confirmed(tokens, 0))
        length = len(encoded) // TOKEN_BYTES
        if not 0 < length <= capacity_tokens:
            raise EngineContractError(f"a sequence of {length} tokens cannot be admitted for {capacity_tokens}")
        matched = self._match(encoded, scope) if reuse else []
        self._holdings.hold(matched)  # before taking: what is about to be shared must not be evicted for the rest
        fresh = self._holdings.take(self.blocks_for(capacity_tokens) - len(matched))
        if fresh is None:
            self._holdings.let_go(matched)
            return None
        return PagedSequence(self._holdings, self.tokens_per_block, scope, encoded, matched, fresh, reuse=reuse)

    def evict_idle(self) -> int:
        """Forget every cached block that nobody holds; returns how many. For new weights, and for measuring cold runs."""
        idle = self._holdings.tree.idle
        self._holdings.evict(idle)
        return idle

    def check(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well. Walks everything: for tests and for post-mortems."""
        return self._holdings.check()

    def _match(self, encoded: bytes, scope: Scope) -> list[Block]:
        size = self.tokens_per_block * TOKEN_BYTES
        most = (len(encoded) // TOKEN_BYTES - 1) // self.tokens_per_block
        return self._holdings.tree.match(scope, [encoded[at : at + size] for at in range(0, most * size, size)])
