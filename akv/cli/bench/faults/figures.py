"""What `akv bench faults` measures, and what it must not exceed."""

from enum import StrEnum

import msgspec

#: Seconds from the dispatch of a load after which it fails, and that a lookup may take: what the run is set to.
LOAD_DEADLINE_S = 1.5
LOOKUP_DEADLINE_S = 0.5

#: Seconds that a request whose pages cannot be read may take beyond one that the pool was not asked for.
MOST_BEYOND_COLD_S = 2.0
#: Seconds by which a lookup may exceed its deadline.
MOST_LATE_S = 0.05
#: Seconds that a lookup may take while the breaker is open, all but the few that met the scheduler of a busy machine.
MOST_WHILE_OPEN_S = 0.005
#: Seconds after which a pool whose master is back gives pages again.
MOST_UNTIL_AGAIN_S = 30.0


class Fault(StrEnum):
    """Who is halted, and how."""

    HOLDER_FROZEN = "holder_frozen"
    MASTER_FROZEN = "master_frozen"
    MASTER_KILLED = "master_killed"
    HOLDER_KILLED = "holder_killed"


class LookupTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Lookups that ran one after another, in several tasks, while the master was gone. In seconds."""

    longest_s: float
    #: Those that began while the breaker was open.
    while_open: int
    while_open_p50_s: float
    while_open_p95_s: float
    while_open_most_s: float


class FaultFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. The requests are those that met it, and the same prompts once more after the process was back."""

    fault: Fault
    requests: int
    #: Requests that did not end, and requests whose logits are not those of a run without a pool, bit for bit.
    lost: int
    differing: int
    #: Whether one load was inside a get as the process was halted. Another one stood between two gets, and the third request
    #: came afterwards.
    inside_a_get: bool
    #: Why their loads failed; empty for one that did not.
    load_failures: tuple[str, ...]
    #: Once the process was back: requests that had pages from the pool. What a killed one held is gone.
    again_loaded: int
    #: Seconds of the slowest of the requests, with no pool asked, and with the fault.
    cold_s: float
    slowest_s: float
    #: Seconds from the process's return until a request had pages from the pool again. None if that is not waited for: what
    #: a dead holder held is gone.
    again_s: float | None = None
    #: None for the holder: the master answers lookups.
    lookups: LookupTimes | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv bench faults --json` prints."""

    backend: str
    load_deadline_s: float
    lookup_deadline_s: float
    faults: tuple[FaultFigures, ...]
    #: What does not hold, a sentence each.
    missed: tuple[str, ...]


def missed(figures: FaultFigures) -> list[str]:
    """What of these figures does not hold, a sentence each."""
    lookups = figures.lookups
    checks = [
        (figures.lost > 0, f"{figures.lost} of {figures.requests} requests were lost"),
        (figures.differing > 0, f"{figures.differing} of {figures.requests} requests differ from a cold run"),
        (
            lookups is None and figures.slowest_s > figures.cold_s + MOST_BEYOND_COLD_S,
            f"a request took {figures.slowest_s:.3f} s, more than {MOST_BEYOND_COLD_S:g} beyond {figures.cold_s:.3f} cold",
        ),
        (
            figures.again_s is not None and figures.again_s > MOST_UNTIL_AGAIN_S,
            f"pages came again after {figures.again_s} s, not within {MOST_UNTIL_AGAIN_S:g}",
        ),
    ]
    if lookups is not None:
        longest, open_s = lookups.longest_s, lookups.while_open_p95_s
        checks += [
            (
                longest > LOOKUP_DEADLINE_S + MOST_LATE_S,
                f"a lookup took {longest:.3f} s, more than {MOST_LATE_S:g} beyond its deadline of {LOOKUP_DEADLINE_S:g}",
            ),
            (not lookups.while_open, "no lookup met an open breaker"),
            (
                open_s > MOST_WHILE_OPEN_S,
                f"one of 20 lookups took {open_s:.4f} s or more with the breaker open, not less than {MOST_WHILE_OPEN_S:g}",
            ),
        ]
    return [f"{figures.fault}: {sentence}" for is_missed, sentence in checks if is_missed]
