"""A request's life as a table (S7, D2, D6)."""

import itertools

import pytest

from akv.plan.lifecycle import TRANSITIONS, WITHDRAWN, WORKING, Happening, Holds, Phase, diagram, is_free, next_phase


def reachable(phase: Phase) -> set[Phase]:
    found, new = {phase}, {phase}
    while new:
        new = {then for phase in new for then in TRANSITIONS[phase].values()} - found
        found |= new
    return found


def test_every_phase_has_a_row_and_is_reached_and_comes_to_its_end() -> None:
    assert TRANSITIONS.keys() == set(Phase)
    assert reachable(Phase.OPEN) == set(Phase)
    assert all(Phase.CLOSED in reachable(phase) for phase in set(Phase) - {Phase.LOST})
    assert {phase for phase in Phase if not TRANSITIONS[phase]} == {Phase.CLOSED, Phase.LOST}


@pytest.mark.parametrize("phase", [each for each in Phase if each not in (Phase.CLOSED, Phase.LOST, Phase.CANCELLING)])
def test_D6_every_phase_of_a_life_can_be_cancelled(phase: Phase) -> None:
    assert next_phase(phase, Happening.CANCEL) is Phase.CANCELLING


def test_D2_D6_pages_come_back_by_one_way_alone() -> None:
    """Out of a phase that ends an incarnation leads only what says that nothing touches the pages, or a harder end."""
    ending = set(Phase) - WORKING - {Phase.CLOSED, Phase.LOST}
    for phase in ending:
        for happening, then in TRANSITIONS[phase].items():
            assert happening is Happening.PAGES_FREE or then in {*WITHDRAWN, Phase.LOST}
    assert all(Happening.PAGES_FREE not in TRANSITIONS[phase] for phase in set(Phase) - ending)


def test_D8_only_a_preemption_begins_another_incarnation() -> None:
    assert [phase for phase in Phase if TRANSITIONS[phase].get(Happening.PAGES_FREE) is Phase.OPEN] == [Phase.PREEMPTING]


def test_what_does_not_concern_a_phase_changes_nothing() -> None:
    assert next_phase(Phase.FINISHING, Happening.FINISH) is None
    assert next_phase(Phase.CLOSED, Happening.CANCEL) is None
    assert next_phase(Phase.CANCELLING, Happening.LOAD_ENDED) is None


@pytest.mark.parametrize("holds", [Holds(*some) for some in itertools.product((False, True), repeat=3)])
def test_S7_D2_D6_pages_are_free_when_nothing_that_counts_holds_them(holds: Holds) -> None:
    free = {phase for phase in Phase if is_free(phase, holds)}
    expected = set()
    if not holds.saves:
        expected.add(Phase.FINISHING)
    if not holds.loading and not holds.reads:
        expected |= {Phase.CANCELLING, Phase.PREEMPTING}
    assert free == expected


def test_the_diagram_names_each_transition() -> None:
    drawn = diagram()
    for phase, row in TRANSITIONS.items():
        for happening, then in row.items():
            [line] = [line for line in drawn.splitlines() if line.startswith(f"    {phase.value} --> {then.value}: ")]
            assert happening.value in line
    assert drawn.startswith("stateDiagram-v2\n    [*] --> open: open_request\n")
    assert drawn.endswith("    closed --> [*]\n    lost --> [*]")
