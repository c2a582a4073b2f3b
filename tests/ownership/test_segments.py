"""Which segments of the host are known and readable, as the register changes (R3, R4)."""

import msgspec
import pytest

from akv.ownership.segments import Mapped, Segments
from akv.plan.direct import Staged
from akv.values.segments import SegmentEntry

ENTRY = SegmentEntry(
    segment_id="a",
    owner_pid=1,
    owner_started=1,
    pid_namespace=1,
    boot_id="boot",
    uid=1,
    endpoint="host:1",
    base=1,
    size=9,
    path="",
)


def mapped(entry: SegmentEntry = ENTRY) -> Mapped:
    return Mapped(entry, object(), object())


def test_R3_a_segment_can_be_read_from_its_mapping_until_the_register_names_it_no_more() -> None:
    segments = Segments()
    told = [segments.why_none]
    segments.listed([ENTRY])
    told.append(segments.why_none)
    segments.use(made := mapped())
    told.append(segments.why_none)
    assert told == [Staged.NO_SEGMENT, None, None]
    assert (segments.mapped("a"), segments.mapped_bytes) == (made, 9)
    segments.listed([ENTRY])
    assert segments.mapped("a") == made
    segments.listed([])
    assert (segments.why_none, segments.mapped("a"), segments.by_endpoint) == (Staged.NO_SEGMENT, None, {})


def test_R3_a_mapping_that_comes_when_the_register_has_forgotten_its_segment_is_not_used() -> None:
    segments = Segments()
    segments.use(mapped())
    assert segments.all_mapped == []
    segments.listed([msgspec.structs.replace(ENTRY, base=2)])
    segments.use(mapped())
    assert segments.all_mapped == []


def test_R4_an_entry_that_changed_is_another_segment_s() -> None:
    segments = Segments()
    segments.listed([ENTRY])
    segments.use(mapped())
    other = msgspec.structs.replace(ENTRY, owner_pid=2)
    segments.listed([other])
    assert (segments.mapped("a"), segments.by_endpoint["host:1"][0].staged) == (None, Staged.NOT_MAPPED)


def test_R4_an_owner_that_learns_its_endpoint_has_the_same_memory() -> None:
    early = msgspec.structs.replace(ENTRY, endpoint="")
    segments = Segments()
    segments.listed([early])
    segments.use(mapped(early))
    segments.listed([ENTRY])
    (stretch,) = segments.by_endpoint["host:1"]
    assert (stretch.entry, stretch.staged) == (ENTRY, None)
    assert segments.all_mapped[0].entry == ENTRY


@pytest.mark.parametrize("reason", [Staged.REFUSED, Staged.OWNER_GONE])
def test_R3_a_refused_segment_is_not_tried_again_until_its_entry_changes(reason: Staged) -> None:
    segments = Segments()
    segments.listed([ENTRY])
    segments.use(mapped())
    segments.refuse(ENTRY, reason)
    assert (segments.why_none, segments.mapped("a")) == (reason, None)
    segments.listed([ENTRY])
    segments.want(["a"])
    assert (segments.to_map(), segments.by_endpoint["host:1"][0].staged) == ([], reason)
    changed = msgspec.structs.replace(ENTRY, size=10)
    segments.listed([changed])
    segments.refuse(ENTRY, reason)
    segments.want(["a"])
    assert segments.to_map() == [changed], "what is said of the old one says nothing of the new one"


def test_R3_only_what_pages_lie_in_is_mapped_and_once() -> None:
    segments = Segments()
    other = msgspec.structs.replace(ENTRY, segment_id="b")
    segments.want(["a", "gone"])
    segments.listed([ENTRY, other])
    assert segments.to_map() == [ENTRY]
    assert segments.to_map() == []
    segments.use(mapped())
    segments.want(["a"])
    assert segments.to_map() == []
