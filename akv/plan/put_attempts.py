"""How often, when, and for which of its keys a put is tried again, and what it came to for each page (S5).

A state machine without a clock: `PutAttempts.step` says what comes next, and whoever did it tells what came of it.

    Put -> answered() -> Wait -> waited() -> Probe -> probed() -> Put ...        step is None: that was all
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

#: Times that a key is tried at most, the first put included. What is refused three times in a row is no hiccup, and whoever
#: holds the pages offers them again later (S2).
MOST_ATTEMPTS = 3

#: Seconds from the first answer in which attempts begin. Slots and pages are held meanwhile, and the saver does nothing else.
#: Counted from the answer: a put of many large pages takes longer than this by itself.
RETRY_WINDOW_S = 0.1

#: Seconds before the second and before the third attempt. A full pool evicts in the background, and has mostly made room after
#: 20 ms; the rest of the window is for the calls.
PAUSES_S = (0.02, 0.06)

#: Answers that another attempt may change, in the words of `KeyState`, which stands above this layer: room is made, a master
#: or a holder comes back, a half-written key is discarded. After any other the next answer would be the same. "refused": the
#: call's form is wrong, or the reply could not be read. "wrong_size" and "lease_expired" answer gets: from a put they say that
#: the pool is not what it claims to be.
PASSING = frozenset({"no_space", "unavailable", "holder_lost", "missing"})

OK = "ok"
#: The answers of a master or a holder that does not answer itself.
SILENT = frozenset({"unavailable", "holder_lost"})


class Wait(msgspec.Struct, frozen=True):
    """Let so many seconds pass, and tell `waited()`."""

    seconds: float


class Probe(msgspec.Struct, frozen=True):
    """Ask whether these keys are there, and tell `probed()`. One that is by then is another writer's, and counts as stored."""

    #: Indices into the batch, ascending, each of another key.
    pages: tuple[int, ...]


class Put(msgspec.Struct, frozen=True):
    """Hand these pages to the pool, and tell `answered()`."""

    #: Indices into the batch, ascending, each of another key.
    pages: tuple[int, ...]


Step: TypeAlias = Wait | Probe | Put


class PutAttempts:
    """The attempts to store one batch. Pages of one key are merged: the first is put, the others share what becomes of it.

    `most`: attempts at most; 1 for no second one. Whoever stops early simply asks no further: what was not answered is none of
    stored, found and refused.
    """

    def __init__(self, keys: Sequence[str], most: int = MOST_ATTEMPTS) -> None:
        first: dict[str, int] = {}
        #: For each page the first one with its key.
        self._first = [first.setdefault(key, index) for index, key in enumerate(keys)]
        self._most = most
        self._ends_at = 0.0
        #: The last answer to each page that was put.
        self._answers: dict[int, str] = {}
        self._found: set[int] = set()
        #: Pages that another attempt may still store.
        self._open = tuple(first.values())
        #: Attempts that were made.
        self.attempts = 0
        #: Pages that the first attempt left open.
        self.retried: tuple[int, ...] = ()
        #: The first answer to the first of these.
        self.first_trouble = ""
        #: What to do next; None: nothing more.
        self.step: Step | None = Put(self._open) if keys else None

    def answered(self, answers: Sequence[str], began: float, now: float) -> None:
        """What the pool answered to the pages of the `Put`, in the words of `KeyState`. A list of another length says nothing
        about any page, so all are refused. `began`, `now`: when it was asked and when it answered, in seconds.
        """
        pages = self._pages_of(Put)
        if len(answers) != len(pages):
            answers = ["refused"] * len(pages)
        self._answers.update(zip(pages, answers, strict=True))
        # Who needed so long to be unavailable needs as long again: a store that hangs is not asked twice.
        hopeless = SILENT if now - began >= RETRY_WINDOW_S else frozenset()
        self._open = tuple(page for page in self._open if self._answers[page] in PASSING - hopeless)
        self._attempted(now)

    def waited(self) -> None:
        """The time of the `Wait` has passed."""
        self.step = Probe(self._open)

    def probed(self, states: Sequence[str], now: float) -> None:
        """What the pool said of the pages of the `Probe`, as for `answered()`. Only "ok" says that a page is there (L2)."""
        pages = self._pages_of(Probe)
        if len(states) != len(pages):
            states = ["refused"] * len(pages)
        said = dict(zip(pages, states, strict=True))
        self._found.update(page for page in pages if said[page] == OK)
        self._open = tuple(page for page in pages if said[page] != OK)
        # A put to a pool that does not even answer this would only wait once more.
        reachable = tuple(page for page in self._open if said[page] not in SILENT)
        if now > self._ends_at:
            self.step = None
        elif reachable:
            self.step = Put(reachable)
        else:
            self._attempted(now)

    @property
    def stored(self) -> list[bool]:
        """For each page of the batch whether the pool accepted it; which proves no presence."""
        return [self._answers.get(first) == OK for first in self._first]

    @property
    def found(self) -> list[bool]:
        """For each page whether it was there before another attempt: it is present."""
        return [first in self._found for first in self._first]

    @property
    def refused(self) -> list[str]:
        """For each page the last answer to it; empty if it was stored or found, or was not answered."""
        return [
            "" if first in self._found or self._answers.get(first) == OK else self._answers.get(first, "")
            for first in self._first
        ]

    @property
    def in_vain(self) -> bool:
        """Whether the first attempt left pages open, and nothing after it stored or found any of them."""
        return bool(self.retried) and not any(page in self._found or self._answers[page] == OK for page in self.retried)

    def _attempted(self, now: float) -> None:
        """An attempt is over: wait for the next one, if it would begin in time."""
        self.attempts += 1
        if self.attempts == 1:
            self._ends_at = now + RETRY_WINDOW_S
            self.retried = self._open
            self.first_trouble = self._answers[self._open[0]] if self._open else ""
        self.step = None
        if self._open and self.attempts < self._most:
            pause_s = PAUSES_S[self.attempts - 1]
            if now + pause_s <= self._ends_at:
                self.step = Wait(pause_s)

    def _pages_of(self, kind: type[Probe | Put]) -> tuple[int, ...]:
        if isinstance(self.step, kind):
            return self.step.pages
        raise AssertionError(f"the next step is {self.step}, not a {kind.__name__}")
