"""What a `DeviceCopier` promises, on whatever device. Blocking code: it needs no event loop."""

# ruff: noqa: D102, N802 - a test's name says what holds, and by which rule

from itertools import pairwise
from typing import Protocol

import numpy as np
import pytest

from akv.errors import EngineContractError, NotOpenError
from akv.ports.device import DeviceCopier, DeviceSlots, PassEvent, Source
from akv.values.layout import Layout


class DeviceKit(Protocol):
    """A device with an engine beside it, as the suite plays it: pages are written and read on the execution stream."""

    @property
    def device(self) -> DeviceCopier:
        """The open device under test."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout that it was opened with: two groups of different page sizes at least, one with several regions."""
        ...

    @property
    def host_groups(self) -> frozenset[int]:
        """The groups whose pages lie in host memory, each in one piece; none where the device is not the host."""
        ...

    def write(self, group: int, page: int, content: bytes) -> None:
        """Queue a write of a whole page, its regions' bytes concatenated, that takes a moment if the device can take one."""
        ...

    def read(self, group: int, page: int) -> bytes:
        """A page's bytes as a kernel sees them that is queued now; blocks until it ran."""
        ...

    def wait(self, event: PassEvent) -> None:
        """Block until `event.query()` says True; raise if it does not within seconds."""
        ...


class DeviceConformance:
    """Fixture to supply: `kit`, a fresh `DeviceKit` whose groups have eight pages or more each."""

    def test_it_counts_the_pages_of_each_group(self, kit: DeviceKit) -> None:
        assert len(kit.device.page_counts) == len(kit.layout.groups)
        assert all(count >= 8 for count in kit.device.page_counts)

    def test_a_host_buffer_is_memory_at_its_address(self, kit: DeviceKit) -> None:
        one, other = kit.device.host_buffer(1000), kit.device.host_buffer(1)
        assert (one.nbytes, other.nbytes) == (1000, 1)
        assert one.address + 1000 <= other.address or other.address + 1 <= one.address
        view = one.view()
        assert (view.format, view.nbytes, view.readonly, view.contiguous) == ("B", 1000, False, True)
        view[7] = 77
        assert one.view()[7] == 77
        assert np.frombuffer(view, dtype=np.uint8).ctypes.data == one.address

    def test_gather_lays_each_page_at_its_offset_regions_in_order(self, kit: DeviceKit) -> None:
        device = kit.device
        stream = device.open_stream("saver")
        for group, size in enumerate(page_sizes(kit)):
            contents = {page: pattern(10 * group + page, size) for page in (5, 0, 3)}
            for page, content in contents.items():
                kit.write(group, page, content)
            buffer = device.host_buffer(8 * size + 3)
            buffer.view()[:] = bytes(buffer.nbytes)
            offsets = {5: 6 * size + 3, 0: 0, 3: 2 * size}
            event = device.gather(stream, group, list(contents), buffer, [offsets[page] for page in contents], device.record())
            kit.wait(event)
            seen = bytes(buffer.view())
            assert {page: seen[at : at + size] for page, at in offsets.items()} == contents
            between = seen[size : 2 * size] + seen[3 * size : 6 * size + 3] + seen[7 * size + 3 :]
            assert not any(between), "nothing else is written"

    def test_scatter_fills_each_page_from_its_offset_and_no_other(self, kit: DeviceKit) -> None:
        device = kit.device
        stream = device.open_stream("loader")
        for group, size in enumerate(page_sizes(kit)):
            for page in range(8):
                kit.write(group, page, bytes(size))
            contents = {7: pattern(1, size), 1: pattern(2, size), 2: pattern(3, size)}
            buffer = device.host_buffer(5 * size)
            offsets = {7: 0, 1: 4 * size, 2: size}
            for page, at in offsets.items():
                buffer.view()[at : at + size] = contents[page]
            event = device.scatter(
                stream, group, list(contents), buffer, [offsets[page] for page in contents], device.record()
            )
            kit.wait(event)
            assert {page: kit.read(group, page) for page in contents} == contents
            assert not any(any(kit.read(group, page)) for page in range(8) if page not in contents)

    def test_R1_pages_of_several_buffers_come_in_one_call_each_from_its_own(self, kit: DeviceKit) -> None:
        device = kit.device
        stream = device.open_stream("loader")
        for group, size in enumerate(page_sizes(kit)):
            for page in range(8):
                kit.write(group, page, bytes(size))
            one, other = device.host_buffer(3 * size), device.host_buffer(2 * size)
            one.view()[:] = pattern(1, size) + bytes(size) + pattern(2, size)
            other.view()[:] = pattern(3, size) + pattern(4, size)
            sources = [Source([6, 2], one, [0, 2 * size]), Source([], one, []), Source([3, 0], other, [size, 0])]
            event = device.scatter_from(stream, group, sources, device.record())
            device.execution_waits_for(event)
            kit.wait(event)
            expected = {6: pattern(1, size), 2: pattern(2, size), 3: pattern(4, size), 0: pattern(3, size)}
            assert {page: kit.read(group, page) for page in range(8)} == {
                page: expected.get(page, bytes(size)) for page in range(8)
            }

    def test_L6_of_several_buffers_none_is_copied_if_one_is_refused(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        kit.write(0, 0, bytes(size))
        stream, buffer, short = device.open_stream("loader"), device.host_buffer(size), device.host_buffer(size)
        buffer.view()[:] = pattern(1, size)
        for pages, offsets in [([0], [0]), ([device.page_counts[0]], [0]), ([1], [1]), ([1, 2], [0])]:
            sources = [Source([0], buffer, [0]), Source(pages, short, offsets)]
            with pytest.raises((EngineContractError, ValueError, AssertionError)):
                device.scatter_from(stream, 0, sources, device.record())
        kit.wait(device.record())
        assert kit.read(0, 0) == bytes(size)

    def test_D5_a_gather_sees_what_the_pass_before_its_event_computed(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        buffer = device.host_buffer(size)
        kit.write(0, 4, pattern(1, size))
        after_pass = device.record()
        kit.wait(device.gather(device.open_stream("saver"), 0, [4], buffer, [0], after_pass))
        assert bytes(buffer.view()) == pattern(1, size)

    def test_D5_a_scatter_comes_behind_the_fence_of_its_pages(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        buffer = device.host_buffer(size)
        buffer.view()[:] = pattern(2, size)
        kit.write(0, 4, pattern(1, size))
        fence = device.record()
        kit.wait(device.scatter(device.open_stream("loader"), 0, [4], buffer, [0], fence))
        assert kit.read(0, 4) == pattern(2, size)

    def test_M4_the_execution_stream_waits_for_a_load_without_the_host(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        buffer = device.host_buffer(size)
        buffer.view()[:] = pattern(3, size)
        loaded = device.scatter(device.open_stream("loader"), 0, [6], buffer, [0], device.record())
        device.execution_waits_for(loaded)
        assert kit.read(0, 6) == pattern(3, size)
        kit.wait(loaded)
        device.execution_waits_for(loaded)

    def test_copies_on_one_stream_run_in_order_and_on_two_behind_an_event(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[1]
        loader, saver = device.open_stream("loader"), device.open_stream("saver")
        buffer = device.host_buffer(4 * size)
        buffer.view()[:] = pattern(1, size) + pattern(2, size) + bytes(2 * size)
        fence = device.record()
        device.scatter(loader, 1, [0], buffer, [0], fence)
        second = device.scatter(loader, 1, [0], buffer, [size], fence)
        same_stream = device.gather(loader, 1, [0], buffer, [2 * size], fence)
        other_stream = device.gather(saver, 1, [0], buffer, [3 * size], second)
        kit.wait(same_stream)
        kit.wait(other_stream)
        assert bytes(buffer.view()[2 * size :]) == pattern(2, size) * 2

    def test_an_event_that_came_stays(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        kit.write(0, 0, pattern(1, size))
        event = device.record()
        kit.wait(event)
        kit.write(0, 0, pattern(2, size))
        assert event.query()
        assert event.query()
        kit.wait(device.record())

    def test_a_copy_of_no_pages_ends_too(self, kit: DeviceKit) -> None:
        device = kit.device
        stream, buffer = device.open_stream("idle"), device.host_buffer(1)
        kit.wait(device.gather(stream, 0, [], buffer, [], device.record()))
        kit.wait(device.scatter(stream, 0, [], buffer, [], device.record()))
        assert device.record().query()

    def test_L6_pages_that_do_not_exist_and_room_that_is_short_are_refused_and_nothing_is_copied(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        kit.write(0, 0, bytes(size))
        stream, buffer = device.open_stream("loader"), device.host_buffer(2 * size)
        buffer.view()[:] = pattern(1, 2 * size)
        for pages, offsets in [
            ([0, device.page_counts[0]], [0, size]),
            ([0, -1], [0, size]),
            ([0, 1], [0, size + 1]),
            ([0, 1], [0]),
            ([0, 0], [0, size]),
        ]:
            with pytest.raises((EngineContractError, ValueError, AssertionError)):
                device.scatter(stream, 0, pages, buffer, offsets, device.record())
        with pytest.raises((EngineContractError, ValueError, AssertionError)):
            device.gather(stream, 0, [0, 1], buffer, [0, size - 1], device.record())
        kit.wait(device.record())
        assert kit.read(0, 0) == bytes(size)
        assert bytes(buffer.view()) == pattern(1, 2 * size)

    def test_a_page_in_one_piece_of_host_memory_is_read_and_written_there(self, kit: DeviceKit) -> None:
        device = kit.device
        regions = {group: device.host_region(group) for group in range(len(kit.layout.groups))}
        assert {group for group, region in regions.items() if region is not None} == kit.host_groups
        for group, region in regions.items():
            if region is None:
                continue
            size, pages = page_sizes(kit)[group], [device.page_counts[group] - 1, 0, 3]
            offsets = region.offsets(pages)
            assert region.pitch >= size
            assert min(offsets) >= 0
            assert max(offsets) + size <= region.buffer.nbytes
            for page in (*pages, 2):
                kit.write(group, page, pattern(page, size))
            kit.wait(device.record())
            view = region.buffer.view()
            assert (view.format, view.nbytes, view.readonly) == ("B", region.buffer.nbytes, False)
            assert np.frombuffer(view, dtype=np.uint8).ctypes.data == region.buffer.address
            for page, offset in zip(pages, offsets, strict=True):
                assert view[offset : offset + size] == pattern(page, size)
                view[offset : offset + size] = pattern(100 + page, size)
            assert [kit.read(group, page) for page in pages] == [pattern(100 + page, size) for page in pages]
            assert kit.read(group, 2) == pattern(2, size), "the page beside it is as it was"

    def test_host_memory_of_two_groups_is_one_buffer_or_lies_apart(self, kit: DeviceKit) -> None:
        regions = [kit.device.host_region(group) for group in kit.host_groups]
        buffers = list({id(region.buffer): region.buffer for region in regions if region is not None}.values())
        buffers.sort(key=lambda buffer: buffer.address)
        for buffer, behind in pairwise(buffers):
            assert buffer.address + buffer.nbytes <= behind.address, "the store refuses to register memory twice"

    def test_M5_a_snapshot_holds_what_was_there_although_the_engine_writes_next(self, kit: DeviceKit) -> None:
        device = kit.device
        stream = device.open_stream("ring")
        for group, size in enumerate(page_sizes(kit)):
            pages, slots = [5, 0, 3, 7], [4, 1, 2, 6]
            for via in ways(kit, size, [3, 0, 1, 4]):
                for page in pages:
                    kit.write(group, page, pattern(page, size))
                buffer = device.host_buffer(8 * size)
                buffer.view()[:] = bytes(8 * size)
                event = device.snapshot(stream, group, pages, buffer, [slot * size for slot in slots], via)
                for page in pages:
                    kit.write(group, page, pattern(100 + page, size))
                kit.wait(event)
                seen = [bytes(buffer.view()[slot * size : (slot + 1) * size]) for slot in range(8)]
                assert [seen[slot] for slot in slots] == [pattern(page, size) for page in pages]
                assert not any(any(seen[slot]) for slot in range(8) if slot not in slots), "nothing else is written"
                assert [kit.read(group, page) for page in pages] == [pattern(100 + page, size) for page in pages]

    def test_S3_slots_may_be_used_again_once_the_snapshot_arrived(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        stream, buffer = device.open_stream("ring"), device.host_buffer(2 * size)
        for page in range(6):
            kit.write(0, page, pattern(page, size))
        for via in ways(kit, size, [1, 0]):
            for page in (0, 2, 4):
                kit.wait(device.snapshot(stream, 0, [page, page + 1], buffer, [size, 0], via))
                assert bytes(buffer.view()) == pattern(page + 1, size) + pattern(page, size)

    def test_S3_snapshots_one_after_the_other_need_no_event_between_them(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[1]
        stream, buffer = device.open_stream("ring"), device.host_buffer(4 * size)
        ends: dict[int, tuple[PassEvent, bytes]] = {}
        for number, slot in enumerate((2, 0)):
            content = pattern(number, size)
            kit.write(1, 4, content)
            for at, via in enumerate(ways(kit, size, [number]), slot):
                ends[at] = device.snapshot(stream, 1, [4], buffer, [at * size], via), content
        for at, (event, content) in ends.items():
            kit.wait(event)
            assert bytes(buffer.view()[at * size : (at + 1) * size]) == content

    def test_a_snapshot_of_no_pages_arrives_and_of_a_page_twice_too(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        stream, buffer = device.open_stream("ring"), device.host_buffer(2 * size)
        kit.write(0, 1, pattern(1, size))
        for via in ways(kit, size, []):
            kit.wait(device.snapshot(stream, 0, [], buffer, [], via))
        for via in ways(kit, size, [0, 1]):
            kit.wait(device.snapshot(stream, 0, [1, 1], buffer, [0, size], via))
            assert bytes(buffer.view()) == pattern(1, size) * 2

    def test_M6_a_snapshot_that_is_refused_copies_nothing(self, kit: DeviceKit) -> None:
        device, size = kit.device, page_sizes(kit)[0]
        stream, buffer = device.open_stream("ring"), device.host_buffer(2 * size)
        buffer.view()[:] = pattern(1, 2 * size)
        wrong: list[tuple[list[int], list[int], DeviceSlots | None]] = [
            (pages, offsets, via)
            for via in ways(kit, size, [0, 1])
            for pages, offsets in [
                ([0, device.page_counts[0]], [0, size]),
                ([0, -1], [0, size]),
                ([0, 1], [0, size + 1]),
                ([0, 1], [0, size - 1]),
                ([0, 1], [0]),
            ]
        ]
        for via in ways(kit, size, [0, 1])[1:]:
            assert via is not None
            room = via.buffer.nbytes
            misplaced = [0], [0, size - 1], [0, room - size + 1], [-1, size], [0, size, 2 * size]
            wrong += [([0, 1], [0, size], via._replace(offsets=places)) for places in misplaced]
        for pages, offsets, via in wrong:
            with pytest.raises((EngineContractError, ValueError, AssertionError)):
                device.snapshot(stream, 0, pages, buffer, offsets, via)
        kit.wait(device.record())
        assert bytes(buffer.view()) == pattern(1, 2 * size)

    def test_only_a_device_apart_from_the_host_has_device_slots(self, kit: DeviceKit) -> None:
        buffer = kit.device.device_buffer(1000)
        assert buffer is None or not kit.host_groups
        assert buffer is None or buffer.nbytes == 1000

    def test_close_is_idempotent_and_memory_outlives_it(self, kit: DeviceKit) -> None:
        device = kit.device
        buffer = device.host_buffer(64)
        view = buffer.view()
        device.open_stream("unused")
        device.close()
        device.close()
        view[:] = bytes(range(64))
        assert bytes(buffer.view()) == bytes(range(64))
        with pytest.raises(NotOpenError):
            device.record()


def ways(kit: DeviceKit, size: int, slots: list[int]) -> list[DeviceSlots | None]:
    """The ways that a snapshot can go: straight to the host, and through slots of `size` bytes on a device that has some."""
    buffer = kit.device.device_buffer(8 * size)
    return [None] if buffer is None else [None, DeviceSlots(buffer, [slot * size for slot in slots])]


def page_sizes(kit: DeviceKit) -> list[int]:
    """Bytes of a page of each group."""
    return [group.bytes_per_page for group in kit.layout.groups]


def pattern(seed: int, size: int) -> bytes:
    """Bytes that belong to no other seed, every kind of NaN among them: a copy that computes would change some."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
