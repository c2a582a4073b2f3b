"""What is known to be in the pool is remembered up to a bound, the most recently seen (S13)."""

from hypothesis import given
from hypothesis import strategies as st

from akv.ownership.known_hashes import FULL, MOST_HASHES, KnownHashes


def test_S13_a_hash_is_known_until_it_is_forgotten() -> None:
    known = KnownHashes()
    known.add([b"a", b"b"])
    known.forget([b"b", b"never known"])
    assert (b"a" in known, b"b" in known, len(known)) == (True, False, 1)


def test_S13_beyond_the_bound_what_was_not_seen_for_longest_is_forgotten() -> None:
    known = KnownHashes(most=3)
    known.add([b"a", b"b", b"c"])
    known.add([b"a", b"d"])
    assert [name in known for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_S13_the_memory_of_a_connector_is_bounded() -> None:
    known = KnownHashes()
    known.add(index.to_bytes(16) for index in range(MOST_HASHES + 10))
    assert len(known) == MOST_HASHES


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 8), max_size=5)), max_size=20))
def test_S13_the_newest_are_kept(steps: list[tuple[bool, list[int]]]) -> None:
    known, model = KnownHashes(most=4), list[bytes]()
    for adds, numbers in steps:
        hashes = [number.to_bytes(16) for number in numbers]
        for one in hashes:
            if one in model:
                model.remove(one)
        if adds:
            known.add(hashes)
            model += list(reversed(dict.fromkeys(reversed(hashes))))
            model = model[-4:]
        else:
            known.forget(hashes)
        assert {n for n in range(9) if n.to_bytes(16) in known} == {int.from_bytes(one) for one in model}


def test_S13_pages_of_a_window_group_are_known_apart_from_others() -> None:
    known = KnownHashes()
    known.add([b"a"])
    known.add([b"a", b"b"], 1)
    known.add([b"b"], 0)
    assert [known.has(name, group) for name in (b"a", b"b") for group in (FULL, 0, 1)] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert (b"a" in known, b"b" in known) == (True, False)
    known.forget_pages([b"a", b"b", b"never known"], 1)
    known.forget_pages([b"a"], 2)
    assert (b"a" in known, known.has(b"a", 1), known.has(b"b", 1), known.has(b"b", 0)) == (True, False, False, True)
    known.forget([b"b"])
    assert not known.has(b"b", 0)


def test_S13_window_pages_take_no_room_beside_the_blocks_that_they_are_of() -> None:
    known = KnownHashes(most=3)
    known.add([b"a", b"b", b"c"])
    for group in range(5):
        known.add([b"a", b"b", b"c"], group)
    assert len(known) == 3
    # A window page that was seen keeps its block.
    known.add([b"a"], 1)
    known.add([b"d"])
    assert [name in known for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_S13_what_nothing_is_known_of_takes_no_room() -> None:
    known = KnownHashes()
    known.forget_pages([b"never stored"], 1)
    known.add([b"a"], 1)
    known.forget_pages([b"a"], 1)
    assert len(known) == 0
