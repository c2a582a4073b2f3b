"""When the pool is not asked, and when it is again (O7, M3)."""

from collections.abc import Callable

import pytest

from akv.plan.breaker import FIRST_PROBE_S, LONGEST_WAIT_S, Breaker, Trouble, Waited
from akv.values.pressure import BreakerState

CLOSED, OPEN, PROBING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.PROBING


def closed() -> Breaker:
    return Breaker()


def opened() -> Breaker:
    breaker = Breaker()
    assert breaker.unavailable(0, 10.0)
    return breaker


def probing() -> Breaker:
    breaker = opened()
    breaker.probe_begins()
    return breaker


def times_out_twice(breaker: Breaker) -> bool:
    return [breaker.timed_out(waited, 11.0) for waited in (Waited.LOOKUP, Waited.LOAD)][-1]


@pytest.mark.parametrize(
    ("start", "happens", "state", "changed"),
    [
        (closed, lambda b: b.unavailable(0, 11.0), OPEN, True),
        (closed, times_out_twice, OPEN, True),
        (closed, lambda b: b.timed_out(Waited.LOAD, 11.0), CLOSED, False),
        (closed, lambda b: b.quarantine_full(11.0), OPEN, True),
        (opened, lambda b: b.unavailable(0, 11.0), OPEN, False),
        (opened, times_out_twice, OPEN, False),
        (opened, lambda b: b.quarantine_full(11.0), OPEN, False),
        (opened, lambda b: b.probe_begins(), PROBING, None),
        (probing, lambda b: b.unavailable(0, 11.0), PROBING, False),
        (probing, times_out_twice, PROBING, False),
        (probing, lambda b: b.quarantine_full(11.0), PROBING, False),
        (probing, lambda b: b.probe_ended(11.0, answered=False, quarantine_full=False), OPEN, False),
        (probing, lambda b: b.probe_ended(11.0, answered=True, quarantine_full=True), OPEN, False),
        (probing, lambda b: b.probe_ended(11.0, answered=True, quarantine_full=False), CLOSED, True),
    ],
)
def test_O7_every_transition(
    start: Callable[[], Breaker], happens: Callable[[Breaker], bool | None], state: BreakerState, changed: bool | None
) -> None:
    breaker = start()
    assert happens(breaker) is changed
    assert breaker.state is state


@pytest.mark.parametrize(
    ("answered", "waits", "opens"),
    [
        (Waited.LOOKUP, (Waited.LOOKUP, Waited.LOOKUP), False),
        (Waited.LOAD, (Waited.LOAD, Waited.LOAD), False),
        # The master answers lookups beside a holder that delivers nothing, and the other way round.
        (Waited.LOAD, (Waited.LOOKUP, Waited.LOOKUP), True),
        (Waited.LOOKUP, (Waited.LOAD, Waited.LOAD), True),
        (Waited.LOOKUP, (Waited.LOAD, Waited.LOOKUP), True),
    ],
)
def test_O7_an_answer_ends_a_row_of_time_outs_of_its_own_kind(
    answered: Waited, waits: tuple[Waited, Waited], opens: bool
) -> None:
    breaker = Breaker()
    assert not breaker.timed_out(waits[0], 1.0)
    breaker.answered(answered)
    assert breaker.timed_out(waits[1], 2.0) is opens
    assert breaker.state is (OPEN if opens else CLOSED)


def test_O7_time_outs_from_before_the_closing_do_not_count_after_it() -> None:
    breaker = Breaker()
    times_out_twice(breaker)
    breaker.probe_begins()
    assert breaker.probe_ended(12.0, answered=True, quarantine_full=False)
    assert not breaker.timed_out(Waited.LOOKUP, 13.0)
    assert breaker.state is CLOSED


def test_O7_a_call_that_began_before_the_closing_opens_it_no_more() -> None:
    breaker = probing()
    assert breaker.probe_ended(11.0, answered=True, quarantine_full=False)
    assert not breaker.unavailable(0, 12.0)
    assert breaker.unavailable(breaker.generation, 12.0)


def test_O7_the_wait_between_probes_doubles_up_to_a_bound_and_starts_anew_with_each_opening() -> None:
    breaker, now, waits = opened(), 10.0, []
    for _ in range(8):
        waits.append(breaker.next_probe_at - now)
        now = breaker.next_probe_at
        breaker.probe_begins()
        breaker.probe_ended(now, answered=False, quarantine_full=False)
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert (waits[0], waits[-1]) == pytest.approx((FIRST_PROBE_S, LONGEST_WAIT_S))
    breaker.probe_begins()
    breaker.probe_ended(now, answered=True, quarantine_full=False)
    breaker.unavailable(breaker.generation, now)
    assert breaker.next_probe_at - now == pytest.approx(FIRST_PROBE_S)
    breaker.probe_begins()
    breaker.probe_ended(now, answered=False, quarantine_full=False)
    assert breaker.next_probe_at - now == pytest.approx(2 * FIRST_PROBE_S)


@pytest.mark.parametrize(
    ("happens", "trouble"),
    [
        (lambda b: b.unavailable(0, 3.0), Trouble.UNAVAILABLE),
        (times_out_twice, Trouble.TIMEOUTS),
        (lambda b: b.quarantine_full(3.0), Trouble.QUARANTINE),
    ],
)
def test_O7_it_knows_why_it_opened(happens: Callable[[Breaker], bool], trouble: Trouble) -> None:
    breaker = Breaker()
    assert happens(breaker)
    assert breaker.trouble is trouble
