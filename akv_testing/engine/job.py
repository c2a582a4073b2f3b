"""One call of `Engine.generate()`: what the engine keeps of it, and what it answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec
import numpy as np
import torch
from torch import Tensor

from akv.host import PagedSequence
from akv.plan.tokens import Tokens
from akv.units import PageIndex
from akv.values.scope import Scope
from akv_testing.engine.drafter import Guess
from akv_testing.engine.step import Chunk

if TYPE_CHECKING:
    from akv.request import Request

PageTables = tuple[tuple[PageIndex, ...], ...]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What `Engine.generate()` answers."""

    request_id: str
    #: The generated tokens.
    tokens: tuple[int, ...]
    prompt_tokens: int
    #: Tokens of the prompt whose KV other requests of this engine had computed.
    local_tokens: int
    #: Tokens of the prompt, behind the local ones, whose KV came from the pool.
    from_pool_tokens: int
    #: Seconds from the call to the first generated token.
    ttft_s: float
    #: Of these, seconds of waiting for pages; for the pool's answer; for the load.
    queue_s: float
    lookup_s: float
    load_s: float
    #: When each generated token was there, by the event loop's clock.
    token_times: tuple[float, ...] = ()
    #: What the lookup found, as akv names it; empty if the pool was not asked.
    lookup_outcome: str = ""
    #: Why the last load that failed did, one word; empty if none failed.
    load_failure: str = ""
    #: Loads that failed. After each the request was restarted without that offer.
    failed_loads: int = 0
    #: How often it gave way to an older request, and went on later in other pages.
    preemptions: int = 0
    #: Tokens whose KV came from the pool after preemptions; they do not count as `from_pool_tokens`, nor as local ones.
    reloaded_tokens: int = 0
    #: Drafts that the target gave itself, and those that it did not; those behind one that it did not count as that.
    drafts_accepted: int = 0
    drafts_rejected: int = 0
    #: With `keep_logits`: the logits of each generated step, (generated tokens, vocabulary), on the CPU.
    logits: Tensor | None = None
    #: With `keep_pages`: per layer group, a digest of the page of each whole block that has KV (`Pages.digests`). Pages that a
    #: window gave back are there as they were when they had been loaded, and empty if they were not.
    page_digests: tuple[tuple[bytes, ...], ...] = ()
    #: The request's page table for each layer group. The pages may be another request's by now.
    page_tables: PageTables = ()


class Job:
    """A request inside the engine."""

    def __init__(self, number: int, request_id: str, tokens: Tokens, max_new_tokens: int, scope: Scope) -> None:
        #: Its age: smaller than that of any request that came later. Who is preempted keeps it.
        self.number = number
        self.request_id = request_id
        #: As it came: an array is encoded in a tenth of the loop's time, and a list of its numbers takes 2 ms for 100,000.
        self._prompt = tokens.copy() if isinstance(tokens, np.ndarray) else list(tokens)
        self._generated: list[int] = []
        self.prompt_tokens = len(self._prompt)
        self.max_new_tokens = max_new_tokens
        self.scope = scope
        self.local_reuse = True
        self.keep_logits = self.keep_pages = False
        #: Tokens that are drafted in a pass.
        self.draft_tokens = 0
        #: What the drafter guesses behind the newest token: from the pass that sampled that, and gone with its pages.
        self.guess: Guess | None = None
        self.drafts_accepted = self.drafts_rejected = 0
        #: Tokens that local reuse takes at most; None for as many as there are.
        self.local_at_most: int | None = None
        self.called_at = anyio.current_time()
        #: Ends `generate()` when the engine closes.
        self.stop = anyio.CancelScope()
        #: Set when it has pages; a new one each time that it waits for some.
        self.admitted = anyio.Event()
        #: Set when it has left the batch, complete or preempted; a new one each time that it joins.
        self.out = anyio.Event()
        #: The request's pages, from admission to its end, to a failed load or to a preemption.
        self.sequence: PagedSequence | None = None
        self.tables: PageTables = ()
        #: akv's side of the request, if the engine has a connector.
        self.request: Request | None = None
        #: Set while a pass computes this request: when it is over. Until then its pages are written.
        self.pass_over: anyio.Event | None = None
        #: Tokens whose KV lies in the pages.
        self.computed = 0
        self.local_tokens = self.from_pool_tokens = self.reloaded_tokens = 0
        self.lookup_outcome = ""
        self.load_failure = ""
        self.failed_loads = self.preemptions = 0
        #: Whether it loads what it is offered. Not any more after a load that waited for a holder in vain: one wait is enough.
        self.takes_offers = True
        self.token_times: list[float] = []
        self.logits: list[Tensor] = []
        self.page_digests: tuple[tuple[bytes, ...], ...] = ()
        self.queue_s = self.lookup_s = self.load_s = self.ttft_s = 0.0

    @property
    def length(self) -> int:
        """Tokens known so far."""
        return self.prompt_tokens + len(self._generated)

    @property
    def known(self) -> Tokens:
        """All tokens, for whoever encodes them."""
        return [*self.tokens(0, self.prompt_tokens), *self._generated] if self._generated else self._prompt

    def tokens(self, start: int, end: int) -> list[int]:
        """Those of [start, end) that are known: the prompt, and what was generated."""
        first = self._prompt[start:end]
        behind = self._generated[max(0, start - self.prompt_tokens) : max(0, end - self.prompt_tokens)]
        return [*(first.tolist() if isinstance(first, np.ndarray) else first), *behind]

    def append(self, tokens: Sequence[int]) -> None:
        """These were generated."""
        self._generated += tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it grows to."""
        return self.prompt_tokens + self.max_new_tokens

    @property
    def complete(self) -> bool:
        """Whether all tokens were generated."""
        return self.length == self.capacity_tokens

    @property
    def drafts(self) -> int:
        """Draft tokens of its next pass: so few that it never has more tokens than were asked for."""
        if self.guess is None or self.length - self.computed != 1:
            return 0
        return min(self.draft_tokens, self.capacity_tokens - self.length - 1)

    def read_tables(self) -> None:
        """Take the page tables from the sequence: windows have other pages with each pass."""
        if self.sequence is not None:
            self.tables = self.sequence.page_tables()

    def chunk(self, count: int, drafts: int) -> Chunk:
        """The next `count` tokens, for a pass, and so many drafts behind them."""
        end = self.computed + count
        return Chunk(
            tuple(self.tokens(self.computed, end)),
            self.computed,
            self.tables,
            following=self.tokens(end, end + 1)[0] if end < self.length else None,
            keep_logits=self.keep_logits,
            lora=self.scope.lora,
            drafts=drafts,
            guess=self.guess,
            copies=self._copies,
        )

    @property
    def _copies(self) -> tuple[tuple[PageIndex, PageIndex], ...]:
        """What its first pass has to copy: where its local match ends inside a block."""
        if self.sequence is None or self.computed != self.sequence.local_tokens:
            return ()
        return self.sequence.copies

    def result(self) -> Result:
        """The answer, once complete."""
        return Result(
            request_id=self.request_id,
            tokens=tuple(self._generated),
            prompt_tokens=self.prompt_tokens,
            local_tokens=self.local_tokens,
            from_pool_tokens=self.from_pool_tokens,
            ttft_s=self.ttft_s,
            queue_s=self.queue_s,
            lookup_s=self.lookup_s,
            load_s=self.load_s,
            token_times=tuple(self.token_times),
            lookup_outcome=self.lookup_outcome,
            load_failure=self.load_failure,
            failed_loads=self.failed_loads,
            preemptions=self.preemptions,
            reloaded_tokens=self.reloaded_tokens,
            drafts_accepted=self.drafts_accepted,
            drafts_rejected=self.drafts_rejected,
            logits=torch.cat(self.logits) if self.logits else None,
            page_digests=self.page_digests,
            page_tables=self.tables,
        )
