"""FakeDevice with `host_pages`: a store call on a page is an access of the page, ordered like those of kernels and copies."""

from functools import partial

import pytest

from akv.ports.calls import CallEnd, CallKind, CallSize
from akv.ports.device import HostRegion
from akv.ports.pool import KeyState
from akv_testing.clock import ManualClock
from akv_testing.device import COPY_S, FakeDevice
from akv_testing.errors import MisuseError, UnorderedAccess, UnregisteredBuffer
from akv_testing.memory import HOST_POISON, PAGE_POISON
from akv_testing.pool import FakePool
from akv_testing.ports import fake_ports, tiny_layout
from akv_testing.store import FakeStore

#: Bytes of a page of group 0 of the tiny layout, and of group 1.
SIZE, SIZE_1 = 16, 24


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def device(clock: ManualClock) -> FakeDevice:
    return FakeDevice(tiny_layout(groups=2), (8, 4), clock, host_pages=True)


@pytest.fixture
def region(device: FakeDevice) -> HostRegion:
    region = device.host_region(0)
    assert region is not None
    return region


@pytest.fixture
def pool(clock: ManualClock, region: HostRegion) -> FakePool:
    pool = FakePool(FakeStore(clock))
    pool.register(region.buffer)
    return pool


def test_it_has_to_be_asked_for(clock: ManualClock) -> None:
    assert FakeDevice(tiny_layout(), (8,), clock).host_region(0) is None
    assert fake_ports(now=clock).device.host_region(0) is None
    assert fake_ports(now=clock, host_pages=True).device.host_region(0) is not None


def test_a_put_reads_the_page_and_a_get_writes_it(
    device: FakeDevice, region: HostRegion, pool: FakePool, clock: ManualClock
) -> None:
    device.kernel(writes=[(0, 3, device.pattern(0, seed=1))], duration_s=1)
    clock.advance(1)
    assert device.record().query()
    assert pool.put(["k"], region.buffer, region.offsets([3]), [SIZE])[0].state is KeyState.OK
    assert pool.store.value("k") == device.pattern(0, seed=1)
    assert pool.get(["k"], region.buffer, region.offsets([7]), [SIZE])[0].state is KeyState.OK
    assert device.read_page(0, 7) == device.pattern(0, seed=1)
    assert device.kernel(reads=[(0, 7)]).seen == {(0, 7): device.pattern(0, seed=1)}
    assert device.read_page(0, 6) == bytes([PAGE_POISON]) * SIZE


def test_D5_a_put_before_the_host_saw_the_pass_complete_is_refused(
    device: FakeDevice, region: HostRegion, pool: FakePool, clock: ManualClock
) -> None:
    event = device.kernel(writes=[(0, 3, 1)], duration_s=1)
    clock.advance(1)
    with pytest.raises(UnorderedAccess, match="host reads page 3 of group 0.*behind execution stream, which wrote it"):
        pool.put(["k"], region.buffer, region.offsets([3]), [SIZE])
    pool.put(["other"], region.buffer, region.offsets([2]), [SIZE])
    assert event.query()
    pool.put(["k"], region.buffer, region.offsets([3]), [SIZE])
    assert pool.store.value("k") == b"\x01" * SIZE


def test_D5_a_get_into_a_page_that_a_kernel_still_reads_is_refused(
    device: FakeDevice, region: HostRegion, pool: FakePool, clock: ManualClock
) -> None:
    fence = device.kernel(reads=[(0, 3)], duration_s=1)
    with pytest.raises(UnorderedAccess, match="host writes page 3 of group 0.*behind execution stream, which read it"):
        pool.get(["k"], region.buffer, region.offsets([3]), [SIZE])
    clock.advance(1)
    assert fence.query()
    assert pool.get(["k"], region.buffer, region.offsets([3]), [SIZE])[0].state is KeyState.MISSING
    assert device.read_page(0, 3) == bytes([HOST_POISON]) * SIZE, "what a failed get leaves is undefined"


def test_S7_a_put_that_comes_after_the_page_was_handed_on_is_refused(
    device: FakeDevice, region: HostRegion, pool: FakePool
) -> None:
    device.fill_page(0, 3, 1)
    assert device.record().query()
    device.fill_page(0, 3, 2)
    with pytest.raises(UnorderedAccess, match="host reads page 3"):
        pool.put(["k"], region.buffer, region.offsets([3]), [SIZE])


@pytest.mark.anyio
async def test_S7_a_put_that_outlives_its_pages_is_found_one_way_or_the_other() -> None:
    """How a test shows it: hold the put before its body, hand the pages on, let it go. The body runs when the gate opens."""
    for seen in (False, True):
        ports = fake_ports(host_pages=True)
        region = ports.device.host_region(0)
        assert region is not None
        ports.pool.register(region.buffer)
        ports.device.fill_page(0, 3, 1)
        assert ports.device.record().query()
        ends: list[CallEnd] = []
        gate = ports.runner.hold(CallKind.PUT)
        put = partial(ports.pool.put, ["k"], region.buffer, region.offsets([3]), [SIZE])
        ports.runner.start(CallKind.PUT, put, CallSize(1, SIZE), ends.append)
        reused = ports.device.kernel(writes=[(0, 3, 2)])
        if seen:
            assert reused.query()
        gate.release()
        if seen:
            assert await ports.runner.close(1) == 0
            assert ports.pool.store.value("k") == b"\x02" * SIZE, "wrong bytes under a valid key: for the test to compare"
        else:
            with pytest.raises(UnorderedAccess, match="host reads page 3"):
                await ports.runner.close(1)


def test_copies_and_store_calls_on_one_page_are_ordered_by_events(
    device: FakeDevice, region: HostRegion, pool: FakePool, clock: ManualClock
) -> None:
    staging = device.host_buffer(SIZE)
    loaded = device.scatter(device.open_stream("loader"), 0, [3], staging, [0], device.record())
    clock.advance(COPY_S)
    with pytest.raises(UnorderedAccess, match="behind loader, which wrote it"):
        pool.put(["k"], region.buffer, region.offsets([3]), [SIZE])
    assert loaded.query()
    pool.put(["k"], region.buffer, region.offsets([3]), [SIZE])


def test_M3_each_group_has_a_buffer_or_all_share_one(clock: ManualClock) -> None:
    for one_memory in (False, True):
        device = FakeDevice(tiny_layout(groups=2), (8, 4), clock, host_pages=True, one_memory=one_memory)
        one, other = device.host_region(0), device.host_region(1)
        assert one is not None
        assert other is not None
        assert (one.buffer is other.buffer) == one_memory
        pool = FakePool(FakeStore(clock))
        pool.register(one.buffer)
        if not one_memory:
            with pytest.raises(UnregisteredBuffer):
                pool.put(["k"], other.buffer, other.offsets([2]), [SIZE_1])
            pool.register(other.buffer)
        device.fill_page(1, 2, device.pattern(1, seed=2))
        assert device.record().query()
        pool.put(["k"], other.buffer, other.offsets([2]), [SIZE_1])
        assert pool.store.value("k") == device.pattern(1, seed=2)


def test_a_call_that_takes_a_page_to_be_where_it_is_not_is_misuse(region: HostRegion, pool: FakePool) -> None:
    for offset, size in ((0, SIZE), (region.offset, SIZE + 1), (region.offset + region.pitch - 1, SIZE)):
        with pytest.raises(MisuseError, match="not those of one page"):
            pool.put(["k"], region.buffer, [offset], [size])
    with pytest.raises(MisuseError, match="outside"):
        pool.put(["k"], region.buffer, region.offsets([8]), [SIZE])
    pool.put(["k"], region.buffer, [region.offset + 4], [8])


def test_M3_whether_a_return_lets_go_can_be_set(pool: FakePool) -> None:
    assert pool.lets_go_at_return
    pool.lets_go_at_return = False
    assert not pool.lets_go_at_return
