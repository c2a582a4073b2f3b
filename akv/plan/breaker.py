"""When the pool is not to be asked: a circuit breaker (O7, M3).

A pool whose master is dead holds every call for seconds, and then answers nothing. One call that says so opens the breaker,
two waits in vain do, and so does too much memory in quarantine. While it is open nobody asks the pool but one probe at a time,
and the first probe that gets an answer closes it.

| state | unavailable | second time-out | quarantine full | probe begins | probe in vain | probe answered |
|---|---|---|---|---|---|---|
| closed | open | open | open | - | - | - |
| open | - | - | - | probing | - | - |
| probing | - | - | - | - | open | closed; open while the quarantine is full |
"""

from collections import Counter
from enum import StrEnum

from akv.values.pressure import BreakerState

#: Waits in vain that open it, for a lookup or for a load. One may be a call that had bad luck.
MOST_TIMEOUTS = 2
#: Seconds from the opening to the first probe: where the master lives, as beside a slow peer, next to nothing is lost.
FIRST_PROBE_S = 0.05
#: The wait doubles with each probe in vain, up to so many seconds. A probe itself takes 4.6 beside a dead master, so a pool
#: that is back is in use well within 30.
LONGEST_WAIT_S = 2.0
#: The reason with which loads fail and saves are refused while the pool is not asked.
NOT_ASKED = "breaker_open"


class Trouble(StrEnum):
    """Why it opened. The value is the word that events carry."""

    #: A call answered for every key that the pool cannot be reached.
    UNAVAILABLE = "unavailable"
    #: Deadlines passed while calls were under way.
    TIMEOUTS = "timeouts"
    #: Calls that were given up hold more than `quarantine_max_bytes`.
    QUARANTINE = "quarantine"


class Waited(StrEnum):
    """What was waited for: an answer to the one says nothing about the other, which other processes give."""

    LOOKUP = "lookup"
    LOAD = "load"


class Breaker:
    """The decision. `now` is the loop's clock in seconds. Methods that can open or close it say whether they did."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        #: How often it was closed again. A call that began before that says nothing of the pool as it is now.
        self.generation = 0
        #: Of the present or the last opening: why, when, and how many probes were in vain.
        self.trouble = Trouble.UNAVAILABLE
        self.opened_at = 0.0
        self.in_vain = 0
        #: While open: when the next probe is to begin.
        self.next_probe_at = 0.0
        self._timeouts: Counter[Waited] = Counter()

    def unavailable(self, generation: int, now: float) -> bool:
        """A call that began in this generation answered for every key that the pool cannot be reached."""
        return generation == self.generation and self._open(Trouble.UNAVAILABLE, now)

    def answered(self, waited: Waited) -> None:
        """A call was answered while somebody waited for it: earlier time-outs of its kind are forgotten."""
        del self._timeouts[waited]

    def timed_out(self, waited: Waited, now: float) -> bool:
        """A deadline passed while a call was under way."""
        self._timeouts[waited] += 1
        return self._timeouts.total() >= MOST_TIMEOUTS and self._open(Trouble.TIMEOUTS, now)

    def quarantine_full(self, now: float) -> bool:
        """Calls that were given up hold too much memory (M3)."""
        return self._open(Trouble.QUARANTINE, now)

    def probe_begins(self) -> None:
        """The open breaker's one probe is under way."""
        self.state = BreakerState.PROBING

    def probe_ended(self, now: float, *, answered: bool, quarantine_full: bool) -> bool:
        """The probe returned. Whether the breaker is closed now."""
        if answered and not quarantine_full:
            self.state = BreakerState.CLOSED
            self.generation += 1
            self._timeouts.clear()
            return True
        self.state = BreakerState.OPEN
        self.in_vain += 1
        self.next_probe_at = now + min(FIRST_PROBE_S * 2**self.in_vain, LONGEST_WAIT_S)
        return False

    def _open(self, trouble: Trouble, now: float) -> bool:
        if self.state is not BreakerState.CLOSED:
            return False
        self.state = BreakerState.OPEN
        self.trouble, self.opened_at, self.in_vain = trouble, now, 0
        self.next_probe_at = now + FIRST_PROBE_S
        return True
