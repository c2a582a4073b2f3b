"""FakeDevice: a snapshot is a point of the execution stream, and whoever reads or reuses its memory too early is found."""

import pytest

from akv.errors import DeviceError
from akv.ports.device import DeviceSlots
from akv_testing.clock import ManualClock
from akv_testing.device import COPY_S, TORN, FakeDevice
from akv_testing.errors import MisuseError, UnorderedAccess
from akv_testing.memory import FakeDeviceBuffer, FakeHostBuffer
from akv_testing.ports import tiny_layout
from akv_testing.timeline import FakeStream

#: Bytes of a page of the tiny layout.
SIZE = 16


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.device = FakeDevice(tiny_layout(), (8,), self.clock)
        self.stream: FakeStream = self.device.open_stream("ring")
        self.buffer: FakeHostBuffer = self.device.host_buffer(4 * SIZE)
        slots = self.device.device_buffer(4 * SIZE)
        assert slots is not None
        self.slots: FakeDeviceBuffer = slots

    def via(self, *slots: int) -> DeviceSlots:
        return DeviceSlots(self.slots, [slot * SIZE for slot in slots])


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("through", [False, True])
def test_M5_the_engine_may_overwrite_the_page_at_once(scene: Scene, through: bool) -> None:
    device, clock = scene.device, scene.clock
    device.kernel(writes=[(0, 3, 1)], duration_s=1)
    event = device.snapshot(scene.stream, 0, [3], scene.buffer, [SIZE], scene.via(2) if through else None)
    passed = device.record()
    device.kernel(writes=[(0, 3, 2)], duration_s=1)
    assert device.busy == 1 + through
    clock.advance(1 + 1.5 * COPY_S)
    assert (passed.query(), event.query()) == (True, not through)
    assert device.read_page(0, 3) == bytes([TORN]) * SIZE, "the kernel runs, whether or not the side stream is done"
    clock.advance(COPY_S)
    assert event.query()
    assert scene.buffer.host_read(SIZE, SIZE) == b"\x01" * SIZE
    clock.advance(1)
    assert device.read_page(0, 3) == b"\x02" * SIZE
    record = device.copies[-1]
    assert (record.kind, record.pages, record.offsets, record.via) == ("snapshot", (3,), (SIZE,), (32,) if through else ())


def test_M5_a_live_read_behind_the_pass_instead_of_a_snapshot_is_found(scene: Scene) -> None:
    """Either the engine's next kernel or the gather is not ordered, whichever comes second; or the bytes are wrong."""
    device, clock = scene.device, scene.clock
    device.fill_page(0, 3, 1)
    passed = device.record()
    early = device.gather(scene.stream, 0, [3], scene.buffer, [0], passed)
    with pytest.raises(UnorderedAccess, match="execution stream writes page 3 of group 0.*behind ring, which read it"):
        device.fill_page(0, 3, 2)
    clock.advance(COPY_S)
    assert early.query()
    device.fill_page(0, 3, 2)
    with pytest.raises(UnorderedAccess, match="ring reads page 3 of group 0.*behind execution stream, which wrote it"):
        device.gather(scene.stream, 0, [3], scene.buffer, [SIZE], passed)
    late = device.gather(scene.stream, 0, [3], scene.buffer, [SIZE], device.record())
    clock.advance(COPY_S)
    assert late.query()
    assert scene.buffer.host_read(SIZE, SIZE) == b"\x02" * SIZE, "ordered, and not what the pass computed"


@pytest.mark.parametrize("through", [False, True])
def test_S3_host_slots_are_the_stores_only_after_the_event(scene: Scene, through: bool) -> None:
    event = scene.device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(0) if through else None)
    scene.clock.advance(2 * COPY_S)
    with pytest.raises(UnorderedAccess, match=f"behind {'ring' if through else 'execution stream'}, which wrote it"):
        scene.buffer.host_read(0, SIZE)
    assert event.query()
    scene.buffer.host_read(0, SIZE)


def test_S3_device_slots_are_used_again_only_after_the_event(scene: Scene) -> None:
    device = scene.device
    event = device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(1))
    passed = device.record()
    scene.clock.advance(COPY_S)
    assert passed.query()
    with pytest.raises(UnorderedAccess, match=r"execution stream writes bytes \[16, 32\) of device buffer 2.*behind ring"):
        device.snapshot(scene.stream, 0, [4], scene.buffer, [SIZE], scene.via(1))
    device.snapshot(scene.stream, 0, [4], scene.buffer, [SIZE], scene.via(0))
    scene.clock.advance(COPY_S)
    assert event.query()
    device.snapshot(scene.stream, 0, [5], scene.buffer, [2 * SIZE], scene.via(1))


def test_a_load_into_the_page_must_come_behind_the_snapshot_too(scene: Scene) -> None:
    device = scene.device
    fence = device.record()
    device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(0))
    with pytest.raises(UnorderedAccess, match="loader writes page 3"):
        device.scatter(device.open_stream("loader"), 0, [3], device.host_buffer(SIZE), [0], fence)
    device.scatter(device.open_stream("loader"), 0, [3], device.host_buffer(SIZE), [0], device.record())


def test_a_snapshot_held_holds_the_engine_and_one_held_on_its_way_does_not(scene: Scene) -> None:
    device, clock = scene.device, scene.clock
    way = device.script.hold("carry")
    carried = device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(0))
    kernel = device.kernel(writes=[(0, 3, 2)])
    clock.advance(1)
    assert (kernel.query(), carried.query(), way.holds) == (True, False, True)
    copy = device.script.hold("snapshot")
    direct = device.snapshot(scene.stream, 0, [3], scene.buffer, [SIZE], None)
    kernel = device.kernel(writes=[(0, 3, 4)])
    way.release()
    clock.advance(1)
    assert (carried.query(), direct.query(), kernel.query()) == (True, False, False)
    copy.release()
    clock.advance(1)
    assert (direct.query(), kernel.query(), device.busy) == (True, True, 0)
    assert scene.buffer.host_read(SIZE, SIZE) == b"\x02" * SIZE


@pytest.mark.parametrize(
    ("kind", "through", "late_s"), [("snapshot", False, 5), ("snapshot", True, 5), ("carry", True, 5), ("carry", False, 0)]
)
def test_it_can_be_delayed_and_fail_as_it_runs(scene: Scene, kind: str, through: bool, late_s: float) -> None:
    device, clock = scene.device, scene.clock
    device.script.delay(kind, late_s)  # type: ignore[arg-type]
    event = device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(0) if through else None)
    clock.advance(1)
    assert event.query() == (late_s == 0)
    clock.advance(5)
    assert event.query()
    device.script.fail_copy(kind, RuntimeError("as it ran"), nth=1 + (late_s == 0))  # type: ignore[arg-type]
    event = device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(0) if through else None)
    clock.advance(1)
    if late_s:
        with pytest.raises(DeviceError, match="as it ran"):
            event.query()
        assert scene.buffer.host_read(0, SIZE) == bytes([TORN]) * SIZE
    else:
        assert event.query()


@pytest.mark.parametrize("kind", ["snapshot", "carry"])
def test_M6_it_can_fail_at_the_call_and_then_nothing_is_queued(scene: Scene, kind: str) -> None:
    device = scene.device
    device.script.fail_call(kind, RuntimeError("at the call"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="at the call"):
        device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(0))
    assert device.busy == 0
    scene.buffer.host_write(0, bytes(SIZE))
    device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(0))


def test_S3_room_for_device_slots_ends(scene: Scene) -> None:
    device = FakeDevice(tiny_layout(), (8,), scene.clock, device_bytes=100)
    assert device.device_buffer(60) is not None
    with pytest.raises(MemoryError, match="40 bytes left"):
        device.device_buffer(60)
    for none in (
        FakeDevice(tiny_layout(), (8,), scene.clock, device_bytes=None),
        FakeDevice(tiny_layout(), (8,), scene.clock, host_pages=True),
    ):
        assert none.device_buffer(60) is None


def test_misuse_is_named(scene: Scene) -> None:
    device = scene.device
    with pytest.raises(MisuseError, match=r"must come from device_buffer\(\)"):
        device.snapshot(scene.stream, 0, [3], scene.buffer, [0], DeviceSlots(scene.buffer, [SIZE]))
    with pytest.raises(MisuseError, match="both must come from this device"):
        device.snapshot(scene.stream, 0, [3], scene.slots, [0], None)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="outside device buffer 2"):
        device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(4))
    with pytest.raises(MisuseError, match="2 pages with 1 offsets"):
        device.snapshot(scene.stream, 0, [3, 4], scene.buffer, [0, SIZE], scene.via(1))
    event = device.snapshot(scene.stream, 0, [3], scene.buffer, [0], scene.via(1))
    with pytest.raises(MisuseError, match="close"):
        device.close()
    scene.clock.advance(1)
    assert event.query()
    device.close()
