"""One request in the scheduler half: what is remembered of it from `open_request` to the return of its pages."""

from enum import Enum, auto

from akv.ownership.marks import SaveMarks
from akv.ownership.window_marks import WindowMarks
from akv.plan.hashing import Chain
from akv.values.messages import GroupPages, SaveOrder
from akv.values.requests import LoadCompleted


class Phase(Enum):
    """Where a request stands. Open: may load and be scheduled. Closed: nothing of akv's touches its pages any more, but for
    those in quarantine.
    """

    OPEN = auto()
    #: `finish()`: its saves go on, the pages are held until they ended (S7).
    FINISHING = auto()
    #: `cancel()`: what is queued is withdrawn, the pages are held until no copy touches them; a store call that does is not
    #: waited for, and its pages go into quarantine (D6).
    CANCELLING = auto()
    CLOSED = auto()


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
        #: Tokens that passes are known to have computed, counted from the sequence's start.
        self.computed = 0
        #: After a failed or cancelled load: tokens below which the pages hold valid KV. None: no load of this life was lost.
        self.valid_to: int | None = None
        self.windows = WindowMarks()
        #: For `finish`: where the tables below begin (a block), and the pages from there on of each group.
        self.tail_first = 0
        self.tail: tuple[tuple[int, ...], ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """What messages name it by."""
        return (self.request_id, self.incarnation)
