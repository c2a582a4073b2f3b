"""What the demo's processes tell each other, as JSON lines on standard input and output."""

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """One request that process A answered: the prompt's tokens and the generated ones."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """To a child: what to do. Its standard input carries this line and stays open as long as its parent wants it."""

    #: "lend" memory to the pool, "save" as process A, "serve" as process B.
    part: str
    backend: str
    master_address: str
    conversations: int
    turns: int
    #: What process A answered, for process B: conversations, each a list of its turns.
    answered: tuple[tuple[Turn, ...], ...] = ()


class TimesToFirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Medians, in milliseconds, over the requests of process B."""

    cold: float
    pool_hit: float
    local_hit: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv demo --json` prints. All of it is measured in process B, one request at a time."""

    layout: str
    backend: str
    #: Requests that B served, and the sum of their prompts' tokens.
    requests: int
    prompt_tokens: int
    #: What could have come from the pool (Q2), what did, and their quotient.
    reusable_tokens: int
    from_pool_tokens: int
    reuse: float
    #: Requests with a hit, each of whose generated steps' logits were compared with local reuse; those equal bit for bit (Q1).
    compared: int
    identical_to_local_reuse: int
    #: Pages that came from the pool, each compared with the reference run's page of the same block and group; those that
    #: differ.
    pages_compared: int
    page_mismatches: int
    bytes_saved: int
    bytes_loaded: int
    ttft_ms: TimesToFirstToken

    @property
    def differs(self) -> bool:
        """Whether the demo failed: something differs, or there was nothing to compare."""
        return bool(
            self.identical_to_local_reuse != self.compared
            or self.page_mismatches
            or not self.compared
            or not self.pages_compared
        )


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From a child: one line of progress or its result. Any other line on its standard output is not ours and is ignored."""

    #: Requests done and requests in all, of the step that is named.
    step: str = ""
    done: int = 0
    of: int = 0
    #: The memory is lent: the pool can be used.
    ready: bool = False
    answered: tuple[tuple[Turn, ...], ...] | None = None
    figures: Figures | None = None
