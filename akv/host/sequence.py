"""A request's pages, from admission to release."""

from akv.errors import EngineContractError
from akv.host.holding import Holdings
from akv.host.pages import Block
from akv.plan.tokens import TOKEN_BYTES, Tokens, encode_confirmed
from akv.units import PageIndex
from akv.values.scope import Scope


class Hold:
    """Keeps a sequence's pages from being evicted, freed or reused after the sequence itself was released."""

    def __init__(self, holdings: Holdings, blocks: list[Block]) -> None:
        self._holdings = holdings
        self._holder = holdings.register(blocks)

    @property
    def released(self) -> bool:
        """Whether it holds nothing any more."""
        return not self._holdings.is_live(self._holder)

    def release(self) -> None:
        """Let go of every block. Computed ones stay for reuse until their pages are needed; others are free. Idempotent.

        Only when nobody reads or writes the pages through this holder any more: the pass that used them is over, and the
        connector said so (`finished()` or `cancel()` returned, or the load is terminal). Else take a `hold()` first.
        """
        self._holdings.release(self._holder)


class PagedSequence(Hold):
    """The pages of one sequence of tokens. Made by `PagedCache.admit()`."""

    def __init__(
        self,
        holdings: Holdings,
        tokens_per_block: int,
        scope: Scope,
        encoded: bytes,
        matched: list[Block],
        fresh: list[Block],
        *,
        reuse: bool,
    ) -> None:
        self._held = matched + fresh
        super().__init__(holdings, self._held)
        self._tokens_per_block = tokens_per_block
        self._scope = scope
        self._encoded = bytearray(encoded)
        self._reuse = reuse
        self._table = matched + fresh
        #: The tree's block for each whole block committed so far. Not always ours: when two sequences compute equal tokens
        #: at the same time, the first one's block stands in the tree and ours stays private.
        self._path = list(matched)
        self._groups = len(self._table[0].pages)
        #: Tokens found computed at admission, a multiple of T.
        self.local_tokens = len(matched) * tokens_per_block

    @property
    def tokens(self) -> int:
        """Tokens known so far: the prompt, and what was appended."""
        return len(self._encoded) // TOKEN_BYTES

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits into the pages."""
        return len(self._table) * self._tokens_per_block

    def page_tables(self) -> tuple[tuple[PageIndex, ...], ...]:
        """For each layer group, the page of block i at position i: what `Scheduled.pages` and `Request.reserve()` take."""
        return tuple(tuple(block.pages[group] for block in self._table) for group in range(self._groups))

    def append(self, tokens: Tokens) -> None:
        """Add confirmed tokens. Raises TokenError for one outside int64; nothing is added then."""
        self._refuse_if_released()
        self._encoded += encode_confirmed(tokens, self.tokens)

    def commit(self, computed_tokens: int) -> None:
        """Say that the KV of the first `computed_tokens` tokens lies in the pages: whole blocks become reusable by others.

        Call it after the pass that computed them, or when a load is LOADED; never for pages that a failed load may have
        touched. Raises EngineContractError if more is claimed than there are tokens or pages.
        """
        self._refuse_if_released()
        if not 0 <= computed_tokens <= min(self.tokens, self.capacity_tokens):
            raise EngineContractError(
                f"{computed_tokens} tokens cannot have been computed: the sequence has {self.tokens} and pages for "
                f"{self.capacity_tokens}"
            )
        if not self._reuse:
            return
        size = self._tokens_per_block * TOKEN_BYTES
        for number in range(len(self._path), computed_tokens // self._tokens_per_block):
            key = bytes(self._encoded[number * size : (number + 1) * size])
            before = self._path[-1] if self._path else None
            own = self._table[number]
            resident = self._holdings.tree.insert(self._scope, before, key, own)
            if resident is not own:
                # Held although we do not read it: what we insert behind it must not outlive it (the tree's invariant).
                self._holdings.hold([resident])
                self._held.append(resident)
            self._path.append(resident)

    def grow(self, capacity_tokens: int) -> bool:
        """Book further pages, up to `capacity_tokens` in all; False if they are not there: nothing was taken then."""
        self._refuse_if_released()
        fresh = self._holdings.take(max(0, -(-capacity_tokens // self._tokens_per_block) - len(self._table)))
        if fresh is None:
            return False
        self._table.extend(fresh)
        self._held.extend(fresh)
        return True

    def hold(self) -> Hold:
        """A second holder of all present blocks, for a reader that outlives the sequence (saves after the request's end)."""
        self._refuse_if_released()
        self._holdings.hold(self._held)
        return Hold(self._holdings, list(self._held))

    def release(self) -> None:
        """As `Hold.release()`; the page tables are empty afterwards."""
        super().release()
        self._table = []

    def _refuse_if_released(self) -> None:
        if self.released:
            raise EngineContractError("this sequence was released: its pages may hold another request's KV")
