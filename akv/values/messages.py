"""What the scheduler half and the worker half say to each other: versioned msgspec messages.

In one process they travel in memory; between processes the engine carries them, encoded with `msgspec.msgpack`.
Unknown fields are tolerated when decoding, because the other side may be newer; a different `version` is refused at start.
Pages travel in columns, one entry per page, because a prompt of 100,000 tokens has thousands of them and a pass has no time
for thousands of objects.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import compress
from typing import TypeAlias

import msgspec

from akv.values.layout import Layout

#: Changes whenever the meaning of a message changes. Halves of different versions refuse each other at start.
MESSAGE_VERSION = 3


#: Pages of each layer group, in the order of the layout; `()` for none at all.
PagesPerGroup: TypeAlias = tuple[tuple[int, ...], ...]


class GroupPages(msgspec.Struct, frozen=True):
    """Pages of one layer group, in columns of equal length."""

    group: int
    #: Block ordinals, ascending.
    blocks: tuple[int, ...]
    #: Page indices in the engine's cache, one per block.
    pages: tuple[int, ...]
    #: Chain hashes, 16 bytes each, one per block.
    hashes: tuple[bytes, ...]


def pages_per_group(columns: Iterable[GroupPages], groups: int) -> PagesPerGroup:
    """The pages of these columns, sorted into the layout's groups; `()` for no column."""
    tables: list[list[int]] = [[] for _ in range(groups)]
    for column in columns:
        tables[column.group].extend(column.pages)
    return tuple(map(tuple, tables)) if any(tables) else ()


def select_pages(columns: GroupPages, keep: Sequence[bool]) -> GroupPages:
    """The pages whose entry in `keep` is true."""
    return GroupPages(
        columns.group,
        tuple(compress(columns.blocks, keep)),
        tuple(compress(columns.pages, keep)),
        tuple(compress(columns.hashes, keep)),
    )


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Scheduler to worker: fill these pages. They are the connector's until the worker reports a terminal state (D2)."""

    load_id: int
    request_id: str
    incarnation: int
    groups: tuple[GroupPages, ...]
    #: Of the queued loads those with the larger number go first (V4).
    priority: int = 0


class SaveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler to worker, inside a plan: after the pass, publish these pages.

    The request holds them until the result, or until the pass has ended if they are copied then.
    """

    save_id: int
    request_id: str
    incarnation: int
    groups: tuple[GroupPages, ...]
    #: Pages of window groups, which make an end resumable (W3). The marks of blocks do not follow them.
    window: bool = False
    #: Copied into slots of the snapshot ring before the pass's event (S3); else read live, behind that event.
    snapshot: bool = False
    #: The pool may hold them already: asked first, and put where missing (D9, S8).
    probe_first: bool = False

    @property
    def pages(self) -> int:
        """How many there are."""
        return sum(len(group.pages) for group in self.groups)


class Withdrawal(msgspec.Struct, frozen=True, kw_only=True, tag="withdraw"):
    """Scheduler to worker: this incarnation ended. Stop its load, drop its saves that have not been read yet."""

    request_id: str
    incarnation: int
    #: The engine has taken the pages away, and writes them in the next pass: nothing may read them any more when that begins.
    preempted: bool = False


class PassPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """Scheduler to worker: what to do around one pass of the engine. Ends exactly once (S2)."""

    plan_id: int
    saves: tuple[SaveOrder, ...] = ()
    version: int = MESSAGE_VERSION


class PassBegins(msgspec.Struct, frozen=True, kw_only=True, tag="begins"):
    """Scheduler to worker, while loads are under way: the engine has planned a pass, whatever it saves (R6)."""


class PlanEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Scheduler to worker, behind a pass that was queued on the execution stream: publish these saves of its plan, no others.

    In one process nothing of the kind is said: there the halves share the plan's end.
    """

    plan_id: int
    #: Their `save_id`s, in the plan's order.
    saves: tuple[int, ...] = ()


class PlanDropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """Scheduler to worker: the pass of this plan will not run; its slots go back."""

    plan_id: int


class SavesNow(msgspec.Struct, frozen=True, kw_only=True, tag="saves"):
    """Scheduler to worker: a request finished; read these pages behind whatever is queued on the execution stream by now."""

    saves: tuple[SaveOrder, ...]


class Renamed(msgspec.Struct, frozen=True, kw_only=True, tag="renamed"):
    """Scheduler to worker: new weights. What begins from here on is named after this revision (K8)."""

    revision: str


class NoMoreWork(msgspec.Struct, frozen=True, kw_only=True, tag="no_more"):
    """Scheduler to worker: the server goes on without a cache. What waits ends with this reason (O8)."""

    reason: str


#: One thing that the scheduler half says.
RankOrder: TypeAlias = (
    LoadOrder | PassBegins | PassPlan | PlanEnded | PlanDropped | SavesNow | Withdrawal | Renamed | NoMoreWork
)


class RankOrders(msgspec.Struct, frozen=True, kw_only=True, tag="orders"):
    """Scheduler to the worker half of every rank: to be carried out in this order, by each of them.

    What an engine carries has a tag each, so that one of them handed over in place of another is refused.
    """

    orders: tuple[RankOrder, ...] = ()
    version: int = MESSAGE_VERSION


class LoadState(StrEnum):
    """The three terminal states of a reservation (D2). In each of them nothing can write into the pages that it gives back."""

    LOADED = "loaded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class BadPage(msgspec.Struct, frozen=True):
    """A page that the pool was asked for and did not deliver, for a reason that may outlast the load (L8)."""

    group: int
    #: Chain hash, 16 bytes.
    hash: bytes
    #: Whether the pool may hold something under its key all the same: then a put changes nothing, the first value stays.
    named: bool


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler: a reservation reached its terminal state."""

    load_id: int
    request_id: str
    incarnation: int
    state: LoadState
    #: Pages and bytes that arrived. 0 unless LOADED: what landed before a failure is discarded.
    pages: int = 0
    bytes: int = 0
    #: Pages and bytes that were read straight from segments of the worker's host; pages and bytes that were not, by the
    #: reason. So far, if it did not get to its end.
    direct_pages: int = 0
    direct_bytes: int = 0
    staged: dict[str, int] = {}
    staged_bytes: dict[str, int] = {}
    #: The first page that was not delivered, and why in one word. Empty unless FAILED.
    failed_key: str = ""
    reason: str = ""
    #: The pages that count as missing from now on. Empty unless FAILED, and where the failure says nothing of the keys: a copy
    #: that failed, our own deadline, a lease that had passed.
    bad_pages: tuple[BadPage, ...] = ()
    #: Pages that a store call which was given up may still write: kept back until `PagesReleased`. Empty if LOADED.
    quarantined: PagesPerGroup = ()


class SaveResult(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler: a save ended. Each block of the order stands in exactly one of the three lists."""

    save_id: int
    request_id: str
    incarnation: int
    #: Blocks whose pages of every group are in the pool.
    stored: tuple[int, ...] = ()
    #: Blocks that the pool did not take; they may be offered again (S2).
    refused: tuple[int, ...] = ()
    #: Blocks that were withdrawn before they were read, or before the pool was seen to hold their window pages.
    dropped: tuple[int, ...] = ()
    #: Bytes handed to the pool.
    bytes: int = 0
    #: Why blocks were refused, one word; empty if none was.
    reason: str = ""


class PagesUnread(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler, after a withdrawal: nothing reads this incarnation's pages any more but for those in quarantine."""

    request_id: str
    incarnation: int
    #: Pages that a store call which was given up still reads.
    quarantined: PagesPerGroup = ()


class PagesReleased(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler, and from `Connector.completed()`: the store call returned, pages leave quarantine (D2)."""

    request_id: str
    incarnation: int
    pages: PagesPerGroup


class PassReport(msgspec.Struct, frozen=True, kw_only=True):
    """Worker to scheduler: what ended since the last report. Order inside one list is the order of the ends."""

    loads: tuple[LoadResult, ...] = ()
    saves: tuple[SaveResult, ...] = ()
    unread: tuple[PagesUnread, ...] = ()
    released: tuple[PagesReleased, ...] = ()
    version: int = MESSAGE_VERSION


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What both halves must agree on. Compared once, at start; a half that differs is refused naming both values (D1)."""

    version: int
    load_mode: str
    role: str
    #: The layout fingerprint, hex. Two halves with different layouts would exchange bytes that mean different things.
    layout: str
    #: The part of every key before the shard: namespace and model key.
    key_space: str
    world: int
    lookahead: int
    #: Pages in each group's cache, in the order of the layout: the bound that page indices are checked against.
    page_counts: tuple[int, ...]
    #: What is stored behind each page, as keys spell it (S11): a page of which ranks keep different ones is never whole.
    trailer: str = ""


class RankReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The worker half of one rank to the scheduler: what became of its orders, and of itself, since it said so last."""

    rank: int
    report: PassReport = PassReport()
    #: The pool was lost for this rank, and is back: what it stored before may be gone (S13).
    pool_returned: bool = False
    #: What it is told to load at present comes to nothing: its gets stand still, or it does not ask the pool (O7).
    loads_nothing: bool = False
    #: Why it serves no more; empty while it does. Its loads fail and its saves are refused from here on (O8).
    degraded: str = ""
    #: Its last report: it has ended, nothing of it touches a page, and it carries nothing out any more.
    ended: bool = False
    version: int = MESSAGE_VERSION


class RankHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The worker half of one rank to the scheduler, before anything else: what both must agree on (D1).

    The layout comes with it, because an engine's scheduler may have no tensors to see it from.
    """

    rank: int
    terms: Terms
    layout: Layout
