"""FakeDevice: bytes move when a copy ends, and what no event orders is refused."""

import pytest

from akv.errors import DeviceError, NotOpenError
from akv.ports.device import DeviceCopier, Source
from akv.ports.pool import KeyState
from akv_testing.clock import ManualClock
from akv_testing.device import COPY_S, TORN, FakeDevice
from akv_testing.errors import MisuseError, UnorderedAccess
from akv_testing.memory import HOST_POISON, PAGE_POISON
from akv_testing.pool import FakePool
from akv_testing.ports import tiny_layout
from akv_testing.store import FakeStore

#: Bytes of a page of group 0 of the tiny layout.
SIZE = 16


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def device(clock: ManualClock) -> FakeDevice:
    device = FakeDevice(tiny_layout(groups=2), (8, 4), clock)
    port: DeviceCopier = device
    assert port.page_counts == (8, 4)
    return device


def test_a_gather_moves_its_bytes_when_it_ends(device: FakeDevice, clock: ManualClock) -> None:
    data = device.pattern(1, seed=3)
    device.fill_page(1, 2, data)
    buffer = device.host_buffer(64)
    event = device.gather(device.open_stream("saver"), 1, [2], buffer, [8], device.record())
    assert buffer.view()[8:32] == bytes([TORN]) * 24
    assert not event.query()
    clock.advance(COPY_S)
    assert event.query()
    assert buffer.host_read(8, 24) == data
    assert buffer.view()[:8] == bytes([HOST_POISON]) * 8


def test_a_scatter_moves_its_bytes_when_it_ends(device: FakeDevice, clock: ManualClock) -> None:
    buffer = device.host_buffer(64)
    buffer.host_write(0, bytes(range(32)))
    event = device.scatter(device.open_stream("loader"), 0, [5, 1], buffer, [0, 16], device.record())
    assert device.read_page(0, 5) == bytes([TORN]) * SIZE
    assert device.busy == 1
    clock.advance(COPY_S)
    assert (device.read_page(0, 5), device.read_page(0, 1)) == (bytes(range(16)), bytes(range(16, 32)))
    assert event.query()
    assert device.read_page(0, 0) == bytes([PAGE_POISON]) * SIZE


def test_copies_wait_for_their_stream_and_their_event(device: FakeDevice, clock: ManualClock) -> None:
    buffer = device.host_buffer(64)
    stream = device.open_stream("saver")
    device.kernel(writes=[(0, 0, 1)], duration_s=10)
    first = device.gather(stream, 0, [0], buffer, [0], device.record())
    second = device.gather(stream, 0, [1], buffer, [16], device.record())
    clock.advance(10 + 1.5 * COPY_S)
    assert (first.query(), second.query()) == (True, False)
    clock.advance(COPY_S)
    assert second.query()
    assert buffer.host_read(0, SIZE) == b"\x01" * SIZE


def test_D5_a_scatter_without_the_allocation_fence_is_refused(device: FakeDevice) -> None:
    fence = device.record()
    device.kernel(reads=[(0, 3)])
    buffer = device.host_buffer(SIZE)
    with pytest.raises(UnorderedAccess, match=r"loader writes page 3 of group 0.*behind execution stream, which read it"):
        device.scatter(device.open_stream("loader"), 0, [3], buffer, [0], fence)


def test_D5_a_forward_that_reads_before_the_load_is_refused(device: FakeDevice, clock: ManualClock) -> None:
    buffer = device.host_buffer(SIZE)
    loaded = device.scatter(device.open_stream("loader"), 0, [3], buffer, [0], device.record())
    with pytest.raises(UnorderedAccess, match=r"execution stream reads page 3 of group 0.*behind loader, which wrote it"):
        device.kernel(reads=[(0, 3)])
    device.execution_waits_for(loaded)
    forward = device.kernel(reads=[(0, 3)])
    assert not forward.query(), "it waits on its stream"
    clock.advance(COPY_S)
    assert forward.query()
    assert forward.seen == {(0, 3): bytes([HOST_POISON]) * SIZE}


def test_D5_a_save_that_does_not_wait_for_its_pass_is_refused(device: FakeDevice) -> None:
    early = device.record()
    device.kernel(writes=[(0, 0, 9)])
    stream, buffer = device.open_stream("saver"), device.host_buffer(SIZE)
    with pytest.raises(UnorderedAccess, match="saver reads page 0"):
        device.gather(stream, 0, [0], buffer, [0], early)


def test_S7_pages_reused_while_a_save_reads_them_are_refused_until_the_host_saw_it_end(
    device: FakeDevice, clock: ManualClock
) -> None:
    saved = device.gather(device.open_stream("saver"), 0, [0], device.host_buffer(SIZE), [0], device.record())
    clock.advance(1)
    with pytest.raises(UnorderedAccess, match="behind saver, which read it"):
        device.kernel(writes=[(0, 0, 9)])
    assert saved.query()
    device.kernel(writes=[(0, 0, 9)])
    assert device.read_page(0, 0) == b"\x09" * SIZE


def test_M2_the_store_may_read_a_slot_only_after_the_gathers_event(device: FakeDevice, clock: ManualClock) -> None:
    pool = FakePool(FakeStore(clock))
    buffer = device.host_buffer(SIZE)
    pool.register(buffer)
    event = device.gather(device.open_stream("saver"), 0, [0], buffer, [0], device.record())
    clock.advance(1)
    with pytest.raises(UnorderedAccess, match=r"host reads bytes \[0, 16\) of host buffer 1.*behind saver"):
        pool.put(["k"], buffer, [0], [SIZE])
    assert event.query()
    assert pool.put(["k"], buffer, [0], [SIZE])[0].state is KeyState.OK


def test_M2_a_slot_may_be_refilled_only_after_the_scatters_event(device: FakeDevice, clock: ManualClock) -> None:
    pool = FakePool(FakeStore(clock))
    buffer = device.host_buffer(2 * SIZE)
    pool.register(buffer)
    event = device.scatter(device.open_stream("loader"), 0, [0], buffer, [0], device.record())
    clock.advance(1)
    pool.get(["other"], buffer, [SIZE], [SIZE])
    with pytest.raises(UnorderedAccess, match="host writes"):
        pool.get(["k"], buffer, [0], [SIZE])
    assert event.query()
    assert pool.get(["k"], buffer, [0], [SIZE])[0].state is KeyState.MISSING


def test_two_loaders_are_ordered_through_events_only(device: FakeDevice, clock: ManualClock) -> None:
    buffer = device.host_buffer(2 * SIZE)
    one, other = device.open_stream("one"), device.open_stream("other")
    fence = device.record()
    first = device.scatter(one, 0, [0], buffer, [0], fence)
    with pytest.raises(UnorderedAccess, match="other writes page 0"):
        device.scatter(other, 0, [0], buffer, [SIZE], fence)
    device.scatter(other, 0, [0], buffer, [SIZE], first)
    clock.advance(2 * COPY_S)
    assert device.busy == 0


def test_a_copy_can_be_delayed_held_and_watched(device: FakeDevice, clock: ManualClock) -> None:
    stream, buffer = device.open_stream("loader"), device.host_buffer(4 * SIZE)
    begun: list[float] = []
    device.script.delay("scatter", 5)
    gate = device.script.hold("scatter", nth=2)
    device.script.before("scatter", lambda: begun.append(clock()), nth=3)
    slow, held, behind = (device.scatter(stream, 0, [page], buffer, [page * SIZE], device.record()) for page in range(3))
    clock.advance(5)
    assert not slow.query()
    clock.advance(5)
    assert (slow.query(), held.query(), gate.holds, begun) == (True, False, True, [])
    gate.release()
    clock.advance(3 * COPY_S)
    assert (held.query(), behind.query(), len(begun)) == (True, True, 1)


def test_a_copy_can_fail_at_the_call_or_as_it_runs(device: FakeDevice, clock: ManualClock) -> None:
    stream, buffer = device.open_stream("saver"), device.host_buffer(2 * SIZE)
    device.script.fail_call("gather", RuntimeError("at the call"))
    device.script.fail_copy("gather", RuntimeError("as it ran"), nth=2)
    with pytest.raises(RuntimeError, match="at the call"):
        device.gather(stream, 0, [0], buffer, [0], device.record())
    event = device.gather(stream, 0, [0], buffer, [0], device.record())
    assert not event.query()
    clock.advance(COPY_S)
    for _ in range(2):
        with pytest.raises(DeviceError, match="as it ran") as caught:
            event.query()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert buffer.host_read(0, SIZE) == bytes([TORN]) * SIZE
    assert device.busy == 0


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_one_event_tells_of_copies_from_several_buffers(device: FakeDevice, clock: ManualClock, nth: int) -> None:
    stream, buffers = device.open_stream("loader"), [device.host_buffer(SIZE) for _ in range(3)]
    sources = [Source([page], buffer, [0]) for page, buffer in enumerate(buffers)]
    event = device.scatter_from(stream, 0, sources, device.record())
    clock.advance(2 * COPY_S)
    assert not event.query()
    clock.advance(COPY_S)
    assert event.query()
    device.script.fail_call("scatter", RuntimeError("at the call"), nth=nth)
    with pytest.raises(RuntimeError, match="at the call"):
        device.scatter_from(stream, 0, sources, device.record())
    assert device.busy == 0
    device.script.fail_copy("scatter", RuntimeError("as it ran"), nth=nth)
    event = device.scatter_from(stream, 0, sources, device.record())
    clock.advance(3 * COPY_S)
    with pytest.raises(DeviceError, match="as it ran"):
        event.query()


def test_misuse_is_named(device: FakeDevice, clock: ManualClock) -> None:
    stream, buffer, fence = device.open_stream("loader"), device.host_buffer(2 * SIZE), device.record()
    with pytest.raises(MisuseError, match="not 8"):
        device.scatter(stream, 0, [8], buffer, [0], fence)
    with pytest.raises(MisuseError, match="outside host buffer 1"):
        device.scatter(stream, 0, [0], buffer, [17], fence)
    with pytest.raises(MisuseError, match="same place"):
        device.scatter(stream, 0, [0, 0], buffer, [0, 16], fence)
    with pytest.raises(MisuseError, match="same place"):
        device.gather(stream, 0, [0, 1], buffer, [0, 8], fence)
    with pytest.raises(MisuseError, match="2 pages with 1 offsets"):
        device.gather(stream, 0, [0, 1], buffer, [0], fence)
    with pytest.raises(MisuseError, match="no event of this device"):
        device.gather(stream, 0, [0], buffer, [0], FakeDevice(tiny_layout(), (1,), clock).record())
    with pytest.raises(MisuseError, match="16 bytes, not 3"):
        device.fill_page(0, 0, b"abc")
    with pytest.raises(MisuseError, match="page counts"):
        FakeDevice(tiny_layout(), (1, 2), clock)


def test_close_refuses_while_a_copy_runs_and_ends_use(device: FakeDevice, clock: ManualClock) -> None:
    event = device.gather(device.open_stream("saver"), 0, [0], device.host_buffer(SIZE), [0], device.record())
    with pytest.raises(MisuseError, match="close"):
        device.close()
    clock.advance(1)
    assert event.query()
    device.close()
    device.close()
    with pytest.raises(NotOpenError):
        device.record()
