"""A request's life, as a table: its phases, what moves it from one to the next, and when its pages are the engine's again.

The table is data: `ownership/requests.py` goes by it, and the diagram of `docs/discussion/request-flow.md` is drawn from it.
A **life** goes from `open_request` to CLOSED. An **incarnation** of it ends with a preemption, which takes the pages away, or
with the life. Both ends are reached only when nothing of akv's can write or read the incarnation's pages any more, but for
those in quarantine (D2, D6, S7).
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """Where a request stands. The value is the word that errors and the documentation use."""

    #: It may be looked up, loaded and scheduled.
    OPEN = "open"
    #: Parked: a load has its pages, or those of a part. It is not scheduled meanwhile.
    LOADING = "loading"
    #: `preempted()`: the pages are wanted back, the life goes on with others. What is queued is withdrawn.
    PREEMPTING = "preempting"
    #: `finish()`: its saves go on, the pages are held until they ended (S7).
    FINISHING = "finishing"
    #: `cancel()`, or the hold took too long: what is queued is withdrawn, the pages are held until no copy touches them; a
    #: store call that does is not waited for, and its pages go into quarantine (D6).
    CANCELLING = "cancelling"
    CLOSED = "closed"
    #: Nobody can see any more what touches its pages: it is over, and they stay in the connector's hands for good (M8).
    LOST = "lost"


class Happening(Enum):
    """What moves a request on. The value is the word of the diagram."""

    RESERVE = "reserve"
    LOAD_ENDED = "load ended"
    PREEMPT = "preempted"
    FINISH = "finish"
    CANCEL = "cancel"
    HELD_TOO_LONG = "held too long"
    #: Nothing touches the incarnation's pages any more: `is_free`.
    PAGES_FREE = "pages free"
    #: The connector failed, and whoever would see the end of what touches the pages with it.
    UNSEEN = "end unseen"


#: The phase that follows, by phase and happening. What has no entry changes nothing if it is an end that is asked for again,
#: and is refused by whoever owns the requests otherwise. A request that finishes during its load keeps nothing: what it had
#: computed may be written over by the load's copies.
TRANSITIONS: Mapping[Phase, Mapping[Happening, Phase]] = {
    Phase.OPEN: {
        Happening.RESERVE: Phase.LOADING,
        Happening.PREEMPT: Phase.PREEMPTING,
        Happening.FINISH: Phase.FINISHING,
        Happening.CANCEL: Phase.CANCELLING,
    },
    Phase.LOADING: {
        Happening.LOAD_ENDED: Phase.OPEN,
        Happening.PREEMPT: Phase.PREEMPTING,
        Happening.FINISH: Phase.CANCELLING,
        Happening.CANCEL: Phase.CANCELLING,
        Happening.UNSEEN: Phase.LOST,
    },
    Phase.PREEMPTING: {
        Happening.PAGES_FREE: Phase.OPEN,
        Happening.FINISH: Phase.CANCELLING,
        Happening.CANCEL: Phase.CANCELLING,
        Happening.UNSEEN: Phase.LOST,
    },
    Phase.FINISHING: {
        Happening.CANCEL: Phase.CANCELLING,
        Happening.HELD_TOO_LONG: Phase.CANCELLING,
        Happening.PAGES_FREE: Phase.CLOSED,
        Happening.UNSEEN: Phase.LOST,
    },
    Phase.CANCELLING: {
        Happening.PAGES_FREE: Phase.CLOSED,
        Happening.UNSEEN: Phase.LOST,
    },
    Phase.CLOSED: {},
    Phase.LOST: {},
}

#: Phases in which a request may be worked on.
WORKING = frozenset({Phase.OPEN, Phase.LOADING})
#: Phases in which its pages are wanted back, and what is queued was withdrawn.
WITHDRAWN = frozenset({Phase.PREEMPTING, Phase.CANCELLING})


class Holds(NamedTuple):
    """What may keep the pages of an incarnation from the engine."""

    #: A load that has not reached its terminal state.
    loading: bool
    #: Copies that read pages, or might: the worker half has not said that there are none.
    reads: bool
    #: Saves that have not ended.
    saves: bool


def next_phase(phase: Phase, happening: Happening) -> Phase | None:
    """The phase that follows; None if this changes nothing in this phase."""
    return TRANSITIONS[phase].get(happening)


def is_free(phase: Phase, holds: Holds) -> bool:
    """Whether an incarnation that ends in this phase has its pages free.

    A finished one waits for its saves. One that was withdrawn waits for the copies alone: what is under way to the pool reads
    slots, or pages that are in quarantine.
    """
    if phase in WITHDRAWN:
        return not holds.loading and not holds.reads
    return phase is Phase.FINISHING and not holds.saves


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.OPEN.value}: open_request"]
    for phase, row in TRANSITIONS.items():
        ways: dict[Phase, list[str]] = {}
        for happening, then in row.items():
            ways.setdefault(then, []).append(happening.value)
        lines += [f"    {phase.value} --> {then.value}: {', '.join(words)}" for then, words in ways.items()]
        if not row:
            lines.append(f"    {phase.value} --> [*]")
    return "\n".join(lines)
