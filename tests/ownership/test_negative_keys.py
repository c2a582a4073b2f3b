"""Pages whose get failed are remembered for a time, by group and hash, up to a bound (L8)."""

from hypothesis import given
from hypothesis import strategies as st

from akv.ownership.negative_keys import MOST_PAGES, NegativeKeys
from akv.values.messages import BadPage, GroupPages

TTL_S = 15.0


def name(number: int) -> bytes:
    return number.to_bytes(16)


def bad(*numbers: int, group: int = 0, named: bool = True) -> list[BadPage]:
    return [BadPage(group, name(number), named) for number in numbers]


def column(*numbers: int, group: int = 0) -> GroupPages:
    return GroupPages(group, numbers, numbers, tuple(map(name, numbers)))


def which(negative: NegativeKeys, numbers: range, now: float, group: int = 0) -> list[int]:
    there = negative.are_bad(group, list(map(name, numbers)), now)
    return [number for number, is_bad in zip(numbers, there, strict=True) if is_bad]


def test_L8_a_page_is_bad_for_its_time_and_in_its_group_alone() -> None:
    negative = NegativeKeys(2, TTL_S)
    negative.failed(bad(1, 3), 100.0)
    assert which(negative, range(5), 100.0) == [1, 3]
    assert which(negative, range(5), 100.0, group=1) == []
    assert which(negative, range(5), 114.9) == [1, 3]
    assert which(negative, range(5), 115.0) == []
    assert len(negative) == 0, "what is over is forgotten"


def test_L8_a_page_that_fails_again_is_bad_from_then_on() -> None:
    negative = NegativeKeys(1, TTL_S)
    negative.failed(bad(1, 2), 0.0)
    negative.failed(bad(1), 10.0)
    assert which(negative, range(5), 15.0) == [1]
    assert which(negative, range(5), 25.0) == []


def test_L8_a_put_clears_what_the_pool_had_not_and_nothing_that_it_named_all_along() -> None:
    negative = NegativeKeys(2, TTL_S)
    negative.failed([*bad(1, 2, named=False), *bad(1, group=1, named=False), *bad(4)], 0.0)
    negative.stored([column(1, 3, 4)])
    assert which(negative, range(5), 0.0) == [2, 4]
    assert which(negative, range(5), 0.0, group=1) == [1]


def test_L8_beyond_the_bound_what_failed_first_is_forgotten() -> None:
    negative = NegativeKeys(1, TTL_S, most=2)
    negative.failed(bad(1, 2), 0.0)
    negative.failed(bad(1, 3), 1.0)
    assert which(negative, range(5), 1.0) == [1, 3]
    default = NegativeKeys(1, TTL_S)
    default.failed(bad(*range(MOST_PAGES + 3)), 0.0)
    assert len(default) == MOST_PAGES


NUMBERS = st.lists(st.integers(0, 6), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["failed", "missing", "stored", "wait"]), st.integers(0, 1), NUMBERS), max_size=30))
def test_L8_as_a_model_that_keeps_every_page_s_end(steps: list[tuple[str, int, list[int]]]) -> None:
    negative, now = NegativeKeys(2, TTL_S), 0.0
    model: dict[tuple[int, int], tuple[float, bool]] = {}
    for step, group, numbers in steps:
        if step == "wait":
            now += 1.0 + 3 * len(numbers)
        elif step == "stored":
            negative.stored([column(*numbers, group=group)])
            model = {page: end for page, end in model.items() if end[1] or page[0] != group or page[1] not in numbers}
        else:
            negative.failed(bad(*numbers, group=group, named=step == "failed"), now)
            model |= {(group, number): (now + TTL_S, step == "failed") for number in numbers}
        for asked in range(2):
            expected = [number for number in range(7) if model.get((asked, number), (now, True))[0] > now]
            assert which(negative, range(7), now, group=asked) == expected


def test_K8_under_new_names_no_page_is_bad() -> None:
    negative = NegativeKeys(2, TTL_S)
    negative.failed([*bad(1), *bad(2, group=1)], 0.0)
    negative.clear()
    assert [which(negative, range(3), 0.0, group) for group in (0, 1)] == [[], []]
