"""How many window pages are booked for a sequence: never too few, and no more than it can come to need (W1, W4)."""

from itertools import product

import pytest

from akv.host.booking import WindowRule

#: Long enough that every window below has moved on, in tokens.
LONG = 60


def most_at_one_time(rule: WindowRule, capacity: int) -> int:
    """Pages that passes of every length come to have, counted block by block."""
    size, chunk, most = rule.tokens_per_block, rule.chunk_tokens or capacity, 0
    for history in range(capacity):
        kept = {block for block in range(-(-history // size)) if block not in rule.released(history)}
        written = range(history // size, -(-min(capacity, history + chunk) // size))
        most = max(most, len(kept | set(written)))
    return most


def test_W1_as_many_pages_are_booked_as_a_sequence_comes_to_have() -> None:
    for size, window, sinks, retention, chunk in product((1, 2, 3, 5), (1, 2, 5, 12), (0, 1, 4), (0, 3, 7), (1, 2, 4, 9)):
        rule = WindowRule(0, window, sinks, size, retention, chunk)
        for capacity in (1, size, 7, LONG):
            counted, booked = most_at_one_time(rule, capacity), rule.pages_for_passes(-(-capacity // size))
            assert counted <= booked
            if capacity == LONG and not sinks:
                assert counted == booked


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("sinks", [0, 1, 6])
def test_W8_a_load_has_pages_beside_the_local_match(window: int, sinks: int) -> None:
    rule = WindowRule(0, window, sinks, 4, 0, 4)
    for local, end in product(range(12), range(1, 12)):
        if local < end:
            there = [*rule.needed(local), *rule.to_load(local, end)]
            assert sum(map(len, there)) <= rule.pages_for_load(12, local)
            if not local:
                assert sum(map(len, there)) <= rule.pages_for_passes(12)


def test_W1_without_a_bound_on_passes_a_window_is_booked_whole() -> None:
    assert WindowRule(0, 5, 0, 4, 0, None).pages_for_passes(20) == 20
