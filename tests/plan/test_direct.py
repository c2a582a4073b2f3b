"""Which pages translate to a mapped segment, why others do not, and how long a lease is good for (R1, R2, R4)."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.direct import Staged, Stretch, in_time, moved, off_by_settings, translate
from akv.settings import Settings
from akv.values.segments import Replica, SegmentEntry

PAGE = 100


def entry(name: str, base: int, size: int, endpoint: str = "host:1") -> SegmentEntry:
    return SegmentEntry(
        segment_id=name,
        owner_pid=1,
        owner_started=1,
        pid_namespace=1,
        boot_id="boot",
        uid=1,
        endpoint=endpoint,
        base=base,
        size=size,
        path="",
    )


def known(*stretches: Stretch) -> dict[str, Sequence[Stretch]]:
    return {
        endpoint: [stretch for stretch in stretches if stretch.entry.endpoint == endpoint]
        for endpoint in {stretch.entry.endpoint for stretch in stretches}
    }


ONE = known(Stretch(entry("a", 1000, 500), None))


@pytest.mark.parametrize(
    ("replica", "reason"),
    [
        (None, Staged.NO_REPLICA),
        (Replica("host:1", 1000, PAGE, complete=False), Staged.INCOMPLETE),
        (Replica("host:1", 1000, PAGE - 1), Staged.OTHER_SIZE),
        (Replica("host:1", 1000, PAGE + 1), Staged.OTHER_SIZE),
        (Replica("host:2", 1000, PAGE), Staged.NOT_SHARED),
        (Replica("host:1", 999, PAGE), Staged.NOT_SHARED),
        (Replica("host:1", 1401, PAGE), Staged.NOT_SHARED),
        (Replica("host:1", 1500, PAGE), Staged.NOT_SHARED),
        (Replica("host:1", 0, PAGE), Staged.NOT_SHARED),
    ],
)
def test_R4_R2_what_does_not_translate_is_staged_for_its_reason(replica: Replica | None, reason: Staged) -> None:
    translation = translate([replica], ONE, PAGE)
    assert (translation.pieces, translation.staged) == ((), {reason: 1})


@pytest.mark.parametrize("offset", [0, 1, 399, 400])
def test_R4_an_address_is_its_distance_from_the_owner_s_base(offset: int) -> None:
    (pieces,) = translate([Replica("host:1", 1000 + offset, PAGE)], ONE, PAGE).pieces
    assert (pieces.segment_id, pieces.indices, pieces.offsets) == ("a", (0,), (offset,))


@pytest.mark.parametrize("reason", [Staged.NOT_MAPPED, Staged.REFUSED, Staged.OWNER_GONE])
def test_R3_pages_of_a_segment_that_cannot_be_read_are_staged_for_the_segment_s_reason(reason: Staged) -> None:
    segments = known(Stretch(entry("a", 1000, 500), reason))
    translation = translate([Replica("host:1", 1000, PAGE)], segments, PAGE)
    assert (translation.pieces, translation.staged) == ((), {reason: 1})
    assert translation.wanted == (frozenset({"a"}) if reason is Staged.NOT_MAPPED else frozenset())


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", ""]), st.integers(0, 400)), max_size=20))
def test_R1_each_page_is_in_one_list_and_reads_from_its_own_place(places: list[tuple[str, int]]) -> None:
    bases = {"a": 1000, "b": 1500, "c": 1000}
    endpoints = {"a": "host:1", "b": "host:1", "c": "host:2"}
    segments = known(*(Stretch(entry(name, bases[name], 500, endpoints[name]), None) for name in bases))
    replicas = [Replica(endpoints[name], bases[name] + at, PAGE) if name else None for name, at in places]
    translation = translate(replicas, segments, PAGE)
    found = {
        index: (pieces.segment_id, offset)
        for pieces in translation.pieces
        for index, offset in zip(pieces.indices, pieces.offsets, strict=True)
    }
    assert found == {index: place for index, place in enumerate(places) if place[0]}
    assert sum(translation.staged.values()) == len(places) - len(found)
    assert len({pieces.segment_id for pieces in translation.pieces}) == len(translation.pieces)


def test_R2_a_page_has_moved_when_anything_of_its_place_changed() -> None:
    here, there = Replica("host:1", 1000, PAGE), Replica("host:1", 2000, PAGE)
    assert moved([here, there], [here, there]) is None
    for other in (None, there, msgspec.structs.replace(here, endpoint="x"), msgspec.structs.replace(here, complete=False)):
        assert moved([there, here], [there, other]) == 1


@pytest.mark.parametrize("reason", [Staged.REFUSED, Staged.OWNER_GONE])
def test_R4_a_segment_that_was_found_unfit_since_is_staged_for_that_reason(reason: Staged) -> None:
    entries = [entry("one", 1000, 500, "host:1"), entry("two", 1000, 500, "host:2")]
    replicas = [Replica(each.endpoint, each.base, PAGE) for each in entries]
    found = translate(replicas, known(*(Stretch(each, None) for each in entries)), PAGE, {"one": reason})
    assert found.staged == {reason: 1}
    assert [pieces.segment_id for pieces in found.pieces] == ["two"]


@pytest.mark.parametrize(("took", "good"), [(0.0, True), (8.9, True), (9.1, False), (11.0, False)])
def test_R2_a_copy_ends_a_margin_before_its_lease(took: float, good: bool) -> None:
    assert in_time(100.0, 100.0 + took, 10.0) is good


@pytest.mark.parametrize(
    ("settings", "off"),
    [
        ({}, None),
        ({"read_path": "staged"}, Staged.SETTING),
        ({"integrity": "checksum"}, Staged.INTEGRITY),
        ({"integrity": "mac", "read_path": "staged"}, Staged.SETTING),
    ],
)
def test_R1_settings_may_leave_only_the_staged_path(settings: dict[str, str], off: Staged | None) -> None:
    assert off_by_settings(Settings(model_key="m", **settings)) is off  # type: ignore[arg-type]
