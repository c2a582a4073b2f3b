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
    assert segments.listed([ENTRY]) == [ENTRY]
    told.append(segments.why_none)
    segments.use(made := mapped())
    told.append(segments.why_none)
    assert told == [Staged.NO_SEGMENT, Staged.NOT_MAPPED, None]
    assert (segments.mapped("a"), segments.mapped_bytes) == (made, 9)
    assert segments.listed([ENTRY]) == [], "it is known"
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
    assert segments.listed([other]) == [other]
    assert segments.mapped("a") is None


def test_R4_an_owner_that_learns_its_endpoint_has_the_same_memory() -> None:
    early = msgspec.structs.replace(ENTRY, endpoint="")
    segments = Segments()
    segments.listed([early])
    segments.use(mapped(early))
    assert segments.listed([ENTRY]) == []
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
    assert segments.listed([ENTRY]) == []
    assert segments.by_endpoint["host:1"][0].staged is reason
    changed = msgspec.structs.replace(ENTRY, size=10)
    assert segments.listed([changed]) == [changed]
    segments.refuse(ENTRY, reason)
    assert segments.why_none is Staged.NOT_MAPPED, "what is said of the old one says nothing of the new one"
