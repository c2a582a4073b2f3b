"""What the demo's processes tell each other, as JSON lines on standard input and output."""

from collections.abc import Callable

import msgspec

from akv.cli.demo.pagebook import PageBook
from akv.cli.demo.setting import DemoLayout
from akv.cli.demo.trace import TraceRow

#: Called as a run goes: what is under way, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]


class Turn(msgspec.Struct, frozen=True):
    """One request that process A answered: the prompt's tokens and the generated ones."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    #: Tokens of the prompt that process A had computed before: where this request resumed, and so how its rest was cut.
    local_tokens: int = 0


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay of a trace, and how. The rows and not the file's name: both processes replay what was checked."""

    rows: tuple[TraceRow, ...]
    #: Tokens of the trace that one replayed token stands for.
    scale: int
    #: How much faster than in the trace requests follow each other.
    speed: float


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """From process A to process B: what it computed, in digests."""

    book: PageBook
    #: Generated tokens by request id.
    answers: dict[str, tuple[int, ...]]
    bytes_saved: int
    #: Median time to the first token, milliseconds.
    ttft_ms: float
    #: How long the replay took.
    seconds: float


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """To a child: the one line on its standard input, which stays open as long as its parent wants the child.

    What the child does, "lend" memory to the pool, "save" as process A or "serve" as process B, is its argument.
    """

    backend: str
    master_address: str
    #: Bytes of memory that the lender gives to the pool.
    segment_bytes: int
    layout: DemoLayout = DemoLayout.FULL
    conversations: int = 0
    turns: int = 0
    #: Where both processes compute and have their pages, for torch.
    device: str = "cpu"
    #: What process A answered, for process B: conversations, each a list of its turns.
    answered: tuple[tuple[Turn, ...], ...] = ()
    #: Instead of conversations.
    trace: TraceJob | None = None
    #: What process A made of the trace, for process B.
    replayed: Replayed | None = None


class TimesToFirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Medians, in milliseconds, over the requests of process B."""

    cold: float
    pool_hit: float
    local_hit: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv demo --json` prints. All of it is measured in process B, one request at a time."""

    layout: str
    backend: str
    device: str
    #: Requests that B served, and the sum of their prompts' tokens.
    requests: int
    prompt_tokens: int
    #: What could have come from the pool (Q2), what did, and their quotient.
    reusable_tokens: int
    from_pool_tokens: int
    reuse: float
    #: Requests with a hit, each of whose generated steps' logits were compared with local reuse; those equal bit for bit (Q1).
    #: Beside a drafter each was answered once more, with drafts: then the tokens have to be equal, too, and how many drafts
    #: were accepted.
    compared: int
    identical_to_local_reuse: int
    #: Lookups by what they found; the names are those of akv's events.
    outcomes: dict[str, int]
    #: Pages that came from the pool, each compared with the reference run's page of the same block and group; those that
    #: differ.
    pages_compared: int
    page_mismatches: int
    #: Of these, pages that B had saved itself, from what it had computed behind a hit. Beside a drafter alone.
    own_pages_compared: int
    #: Of the answers that were compared with drafts, from the pool: drafts that the model gave itself, and those taken back.
    drafts_accepted: int
    drafts_rejected: int
    bytes_saved: int
    bytes_loaded: int
    ttft_ms: TimesToFirstToken

    @property
    def differs(self) -> bool:
        """Whether the demo failed: something differs, or there was nothing to compare."""
        return bool(self.identical_to_local_reuse != self.compared or self.page_mismatches or self.compares_too_little)

    @property
    def compares_too_little(self) -> bool:
        """Whether nothing came from the pool, or beside a drafter nothing that process B had saved itself."""
        drafts = DemoLayout(self.layout).has_drafter
        return not self.compared or not self.pages_compared or (drafts and not self.own_pages_compared)


class TraceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Median times to the first token, in milliseconds, with all that a request waits for under load."""

    #: Over process A's requests: computed, behind what requests before had computed in the same process.
    computed: float
    #: Over those of process B's requests that loaded from the pool.
    pool_hit: float


class TraceSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """How long each process replayed, from the first request's start to the last one's answer."""

    process_a: float
    process_b: float


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv demo --trace FILE --json` prints. Of process B, unless a field says otherwise."""

    layout: str
    backend: str
    #: Tokens of the trace for each replayed one, and how much faster than the trace requests started.
    scale: int
    speed: float
    requests: int
    #: The most requests that had started and were not answered yet.
    peak_in_flight: int
    prompt_tokens: int
    #: What requests found in process B's own cache.
    local_tokens: int
    #: What could have come from the pool beyond that (Q2), what did, and their quotient.
    reusable_tokens: int
    from_pool_tokens: int
    reuse: float
    #: Requests whose load failed, and which computed their prompts instead.
    failed_loads: int
    #: Answers, compared with process A's; those with other tokens.
    answers_compared: int
    answer_mismatches: int
    #: Pages that came from the pool, each compared with process A's of the same prefix and group; those that differ.
    pages_compared: int
    page_mismatches: int
    #: Pages that process A computed more than once and not alike: then nobody can say which bytes the pool has to hold.
    reference_contradictions: int
    #: By process A. What two of its requests computed at the same time counts twice.
    bytes_saved: int
    bytes_loaded: int
    ttft_ms: TraceTimes
    replay_s: TraceSeconds

    @property
    def differs(self) -> bool:
        """Whether the demo failed: something differs, or there was nothing to compare."""
        return bool(self.page_mismatches or self.answer_mismatches or self.reference_contradictions or not self.pages_compared)


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
    replayed: Replayed | None = None
    trace_figures: TraceFigures | None = None
