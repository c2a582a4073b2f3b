"""One request in the scheduler half: what is remembered of it from `open_request` to the return of its pages."""

from akv.ownership.marks import SaveMarks
from akv.ownership.window_marks import WindowMarks
from akv.plan.hashing import Chain
from akv.plan.lifecycle import WORKING, Holds, Phase, is_free
from akv.values.messages import GroupPages, SaveOrder
from akv.values.offers import LookupOutcome
from akv.values.requests import LoadCompleted


class LoadHold:
    """Pages that a request lent to a load, until its terminal state."""

    __slots__ = ("completed", "failed_key", "groups", "load_id", "local_tokens", "tokens")

    def __init__(self, load_id: int, groups: tuple[GroupPages, ...], local_tokens: int, tokens: int) -> None:
        self.load_id = load_id
        self.groups = groups
        self.local_tokens = local_tokens
        self.tokens = tokens
        #: The terminal state; None while the pages are the connector's.
        self.completed: LoadCompleted | None = None
        self.failed_key = ""


class RequestRecord:
    """One request from `open_request` to the return of its pages."""

    def __init__(self, request_id: str, incarnation: int, chain: Chain, marks: SaveMarks, *, reads_cache: bool) -> None:
        self.request_id = request_id
        #: Counts the lives of pages under one id, over requests that reuse the id too: a late message cannot meet a new owner.
        self.incarnation = incarnation
        self.chain = chain
        self.marks = marks
        self.reads_cache = reads_cache
        self.prompt_tokens = chain.length
        #: The length of the prompt's chain, in blocks.
        self.prompt_blocks = chain.hashable_blocks
        #: It fills a batch, or warms the engine up (L7).
        self.dummy = False
        #: The weights changed since it began (K8): what it brings to the pool has names that nobody asks for any more.
        self.outdated = False
        #: Why the request neither reads nor writes, in the word of its lookups; None if it may do both.
        self.excluded: LookupOutcome | None = None
        self.phase = Phase.OPEN
        self.load: LoadHold | None = None
        #: Loads that failed, in this life. A cancelled one is no failure of the pool.
        self.failed_loads = 0
        #: Saves that the worker has not ended, with the blocks of each.
        self.saves: dict[int, SaveOrder] = {}
        #: Blocks that this request's own saves brought to the pool.
        self.stored_blocks = 0
        #: A withdrawal is under way; the worker will say when no copy reads the pages.
        self.awaits_unread = False
        self.windows = WindowMarks()
        self._no_pages()

    def _no_pages(self) -> None:
        """What stands only as long as the pages do."""
        #: Tokens that passes are known to have computed, counted from the sequence's start.
        self.computed = 0
        #: After a failed or cancelled load: tokens below which the pages hold valid KV. None: no load of this incarnation was
        #: lost.
        self.valid_to: int | None = None
        #: For `finish`: where the tables below begin (a block), and the pages from there on of each group.
        self.tail_first = 0
        self.tail: tuple[tuple[int, ...], ...] = ()

    def begin_incarnation(self, number: int) -> None:
        """The life goes on with other pages: what was saved stays saved, and nothing is computed."""
        self.saves.clear()
        self.marks.withdrawn()
        self.windows.begin_incarnation()
        self.incarnation = number
        self._no_pages()

    @property
    def is_open(self) -> bool:
        """Whether it may be worked on."""
        return self.phase in WORKING

    @property
    def is_held(self) -> bool:
        """Whether it finished, and its pages wait for its saves."""
        return self.phase is Phase.FINISHING

    @property
    def is_free(self) -> bool:
        """Whether nothing touches the pages of an incarnation that is ending."""
        holds = Holds(loading=self.load is not None, reads=self.awaits_unread, saves=bool(self.saves))
        return is_free(self.phase, holds)

    @property
    def key(self) -> tuple[str, int]:
        """What messages name it by."""
        return (self.request_id, self.incarnation)
