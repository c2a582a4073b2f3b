"""A process lends files as segments: joining, leaving, and what goes wrong between; with a client that maps them (R3, R5)."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import akv.pool
from akv.errors import PoolError
from akv.plan.segments import Room
from akv.pool import LentSegments, open_pool, segments, touching
from akv.pool.client_log import CLIENT_LOG
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.register import lent_segments, open_segment, read_register, register_directory
from akv.settings import Settings, StoreSettings

pytestmark = pytest.mark.anyio

Events = Callable[..., list[dict[str, Any]]]
MIB = 1 << 20


class ReplicaStatus(IntEnum):
    """As the client's own, whose text has the name of its class in it."""

    COMPLETE = 3

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Module:
    """Stands for `mooncake.store`. Its clients map files and put values there, one behind the other."""

    def __init__(self, base: type) -> None:
        self.made: list[Any] = []
        self.mount_code = 0
        #: Where values land instead of the own segment: "nowhere", in "another" process, there at an address of "ours", too.
        self.elsewhere = ""
        module = self

        class LendingClient(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                module.made.append(self)
                self.mounted: list[tuple[str, int, mmap.mmap]] = []
                self.places: dict[str, tuple[int, int]] = {}

            def mount_segment(self, path: str, size: int, offset: int, protocol: str, location: str) -> dict[str, Any]:
                if module.mount_code:
                    return {"ret": module.mount_code, "segment_ids": []}
                with Path(path).open("r+b") as file:
                    self.mounted.append((path, size, mmap.mmap(file.fileno(), size)))
                return {"ret": 0, "segment_ids": ["1"]}

            def _put(self, key: str, pointer: int, size: int) -> int:
                if self.mounted and module.elsewhere != "nowhere":
                    where = ctypes.addressof(ctypes.c_char.from_buffer(self.mounted[0][2])) + 64 * len(self.places)
                    if not module.elsewhere:
                        ctypes.memmove(where, pointer, size)
                    self.places[key] = (pointer if module.elsewhere == "another" else where, size)
                return int(super()._put(key, pointer, size))

            def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
                return {key: [described(*self.places[key])] for key in keys if key in self.places}

            def close(self) -> int:
                self.mounted.clear()
                return int(super().close())

        self.MooncakeDistributedStore = LendingClient

    def ReplicateConfig(self) -> SimpleNamespace:
        return SimpleNamespace(preferred_segment="")


def described(address: int, size: int) -> Any:
    buffer = SimpleNamespace(buffer_address=address, size=size, transport_endpoint="here:2")
    memory = SimpleNamespace(buffer_descriptor=buffer)
    return SimpleNamespace(status=ReplicaStatus.COMPLETE, is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, memory_client: Any) -> Module:
    made = Module(type(memory_client))

    async def answers(address: str, deadline_s: float) -> None:
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(akv.pool, "load_client_module", lambda: made)
    monkeypatch.setattr(akv.pool, "reach_master", answers)
    monkeypatch.setattr(CLIENT_LOG, "hold", lambda: False)
    return made


@pytest.fixture
def settings(shm: Path) -> Callable[..., Settings]:
    def of(kind: str = "memfd", segment_bytes: int = 65 * MIB, **fields: Any) -> Settings:
        store = StoreSettings(
            master_address="a:1",
            segment_bytes=segment_bytes,
            segment_file_bytes=32 * MIB,
            segment_memory=kind,  # type: ignore[arg-type]
            shared_memory_dir=str(shm),
        )
        return Settings(model_key="m", exit_guard=False, store=store, **fields)

    return of


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not segments._OPEN
    assert not [thread for thread in threading.enumerate() if thread.name == "akv-touch"]


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def touched(lent: LentSegments | None) -> None:
    assert lent is not None
    with anyio.fail_after(20):
        while lent.untouched_bytes:  # noqa: ASYNC110 - a thread makes the progress, and tells nobody
            await anyio.sleep(0.005)


@pytest.mark.parametrize("kind", ["memfd", "file", "auto"])
async def test_R3_segments_are_mounted_registered_touched_and_removed_with_the_pool(
    kind: str, module: Module, settings: Callable[..., Settings], events: Events
) -> None:
    store = settings(kind).store
    async with open_pool(settings(kind)) as pool:
        (client,) = module.made
        assert client.setup_arguments[2] == 0, "the store itself allocates nothing"
        entries = lent_segments(store)
        assert sum(entry.size for entry in entries) == store.segment_bytes
        assert len(entries) == 3
        assert {(entry.endpoint, entry.owner_pid) for entry in entries} == {("here:2", os.getpid())}
        assert sorted((path, size) for path, size, _ in client.mounted) == sorted((one.path, one.size) for one in entries)
        assert {entry.path.startswith("/proc/") for entry in entries} == {kind != "file"}
        await touched(pool.lent)
        for entry in entries:
            descriptor = open_segment(entry)
            assert os.fstat(descriptor).st_blocks * 512 == entry.size
            os.close(descriptor)
        assert client.values == {}, "no key is left behind"
    assert client.closes == 1
    assert names_in(register_directory(store)) == []
    assert events("akv.pool.open", phase="end")[0]["segment_memory"] == ("file" if kind == "file" else "memfd")
    assert events("akv.segment.private") == []


async def test_private_memory_and_none_at_all_are_the_clients_own_business(
    module: Module, settings: Callable[..., Settings], shm: Path
) -> None:
    for kind, size in (("private", 65 * MIB), ("auto", 0)):
        async with open_pool(settings(kind, size)) as pool:
            assert pool.lent is None
            assert module.made[-1].setup_arguments[2] == size
    assert names_in(shm) == []


async def test_R5_own_puts_prefer_the_own_segment_and_the_proof_of_the_data_path_does_not(
    module: Module, settings: Callable[..., Settings], memory: Callable[[int], Any]
) -> None:
    for kind, size, preferred in (("memfd", 32 * MIB, "here:1"), ("private", 32 * MIB, "here:1"), ("auto", 0, "")):
        async with open_pool(settings(kind, size)) as pool:
            client = module.made[-1]
            assert client.preferred[0] == ""
            buffer = memory(16)
            pool.register(buffer)
            pool.put(["a"], buffer, [0], [16])
            pool.put(["b", "b"], buffer, [0, 0], [16, 16])
            assert client.preferred[-2:] == [preferred] * 2
            pool.put_anywhere(["c"], buffer, [0], [16])
            assert client.preferred[-1] == ""
            pool.unregister(buffer)


@pytest.mark.parametrize("kind", ["memfd", "file"])
async def test_too_little_room_is_an_error_with_the_figures_and_the_fix_and_leaves_nothing(
    kind: str, module: Module, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "rooms", lambda kind, directory: [Room("shared memory at /x", 64 * MIB, 80 * MIB)])
    with pytest.raises(PoolError, match=rf"{65 * MIB} bytes.*shared memory at /x: {64 * MIB} of {80 * MIB}.*--shm-size=2g"):
        async with open_pool(settings(kind)):
            pytest.fail("it does not fit")
    assert module.made == []
    assert list(register_directory(settings(kind).store).iterdir()) == []
    async with open_pool(settings(kind, 64 * MIB)) as pool:
        await touched(pool.lent)


async def test_a_named_file_that_shared_memory_cannot_hold_is_refused(
    module: Module, settings: Callable[..., Settings], shm: Path
) -> None:
    # What there really is; sparse files cost nothing until they are refused.
    system = os.statvfs(shm)
    with pytest.raises(PoolError, match="do not fit in .*bytes are free"):
        async with open_pool(settings("file", system.f_blocks * system.f_frsize + MIB)):
            pytest.fail("it does not fit")
    assert names_in(register_directory(settings().store)) == []


async def test_what_others_have_claimed_and_not_taken_yet_is_not_free(
    module: Module, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "rooms", lambda kind, directory: [Room("it", 100 * MIB, 100 * MIB)])
    monkeypatch.setattr(touching, "populate", lambda *arguments: None)
    async with open_pool(settings()):
        with pytest.raises(PoolError, match=r"other processes have claimed 681\d{5} of them"):
            async with open_pool(settings(segment_bytes=64 * MIB)):
                pytest.fail("it would fit alone")


async def test_by_default_too_little_room_means_private_memory_and_is_told(
    module: Module, settings: Callable[..., Settings], events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "rooms", lambda kind, directory: [Room("it", MIB, MIB)])
    async with open_pool(settings("auto")) as pool:
        assert pool.lent is None
        assert module.made[-1].setup_arguments[2] == 65 * MIB
    (told,) = events("akv.segment.private")
    assert str(MIB) in told["reason"]
    assert events("akv.pool.open", phase="end")[0]["segment_memory"] == "private"


async def test_a_file_system_that_is_full_after_all_is_an_error_and_leaves_nothing(
    module: Module, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments, "allocate", full)
    with pytest.raises(PoolError, match="No space left on device; store.segment_memory is 'file'"):
        async with open_pool(settings("file")):
            pytest.fail("there is no memory")
    assert names_in(register_directory(settings().store)) == []


async def test_a_mount_that_fails_is_an_error_and_leaves_nothing(module: Module, settings: Callable[..., Settings]) -> None:
    module.mount_code = -1
    with pytest.raises(PoolError, match=r"code -1.*store\.segment_memory to 'private'"):
        async with open_pool(settings()):
            pytest.fail("nothing was mounted")
    assert [client.closes for client in module.made] == [1]
    assert names_in(register_directory(settings().store)) == []


async def test_by_default_a_mount_that_fails_means_private_memory_and_is_told(
    module: Module, settings: Callable[..., Settings], events: Events
) -> None:
    module.mount_code = -1
    async with open_pool(settings("auto")) as pool:
        assert pool.lent is None
        assert [client.closes for client in module.made] == [1, 0]
        assert [client.setup_arguments[2] for client in module.made] == [0, 65 * MIB]
        assert names_in(register_directory(settings().store)) == []
    assert "code -1" in events("akv.segment.private")[0]["reason"]
    assert events("akv.pool.open", phase="end")[0]["segment_memory"] == "private"


async def test_R3_where_the_kernel_does_not_tell_what_is_mapped_segments_are_lent_and_not_published(
    module: Module, settings: Callable[..., Settings], events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "mapped_at", lambda pid, file: [])
    async with open_pool(settings()) as pool:
        assert len(module.made[0].mounted) == 3
        assert lent_segments(settings().store) == []
        await touched(pool.lent)
    assert events("akv.segment.unpublished") == [{"segments": 3}]


@pytest.mark.parametrize("elsewhere", ["nowhere", "another", "ours"])
async def test_R4_where_values_land_elsewhere_nothing_is_published_and_it_is_told(
    elsewhere: str, module: Module, settings: Callable[..., Settings], events: Events
) -> None:
    module.elsewhere = elsewhere
    async with open_pool(settings()) as pool:
        found = read_register(register_directory(settings().store))
        assert (len(found.claims), found.usable) == (3, ())
        await touched(pool.lent)
    assert events("akv.segment.unpublished") == [{"segments": 3}]
    assert module.made[0].values == {}


async def test_R3_a_cancelled_joining_leaves_nothing(module: Module, settings: Callable[..., Settings]) -> None:
    for delay_s in (0, 0.001, 0.01):
        with anyio.move_on_after(delay_s):
            async with open_pool(settings("file")):
                await anyio.sleep_forever()
        directory = register_directory(settings().store)
        assert not directory.exists() or list(directory.iterdir()) == []


async def test_O8_connectors_that_share_a_client_lend_once_and_whoever_comes_late_has_touching_go_on(
    module: Module, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = threading.Event(), threading.Event()

    def slow(*arguments: int) -> None:
        began.set()
        gate.wait(10)

    monkeypatch.setattr(touching, "populate", slow)
    async with open_pool(settings()) as pool:
        assert began.wait(10)
        async with open_pool(settings(namespace="n")) as other:
            assert other is pool
            assert len(lent_segments(settings().store)) == 3
        # As if the last one had been about to leave.
        assert pool.lent is not None
        assert not pool.lent.stop(0.0)
        gate.set()
        assert pool.lent.stop()
        assert pool.lent.untouched_bytes
        async with open_pool(settings(namespace="n")):
            await touched(pool.lent)


async def test_O6_the_end_of_the_process_waits_for_the_thread_that_touches(
    module: Module, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = threading.Event(), threading.Event()

    def slow(*arguments: int) -> None:
        began.set()
        gate.wait(0.02)

    monkeypatch.setattr(touching, "populate", slow)
    async with open_pool(settings()) as pool:
        assert began.wait(10)
        segments._at_exit()
        assert not [thread for thread in threading.enumerate() if thread.name == "akv-touch"]
        assert lent_segments(settings().store) == []
        pool.probe(["a"])


async def test_O6_beside_a_thread_that_touches_nothing_is_closed_or_unmapped(
    module: Module, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    gate, began = threading.Event(), threading.Event()

    def hangs(*arguments: int) -> None:
        began.set()
        gate.wait(10)

    monkeypatch.setattr(touching, "populate", hangs)
    monkeypatch.setattr(LentSegments.stop, "__defaults__", (0.01,))
    async with open_pool(settings("file")) as pool:
        assert began.wait(10)
    assert module.made[0].closes == 0
    assert len(events("akv.connector.unclean_exit")) == 1
    assert len(lent_segments(settings().store)) == 3, "others read it in place as before"
    with pytest.raises(PoolError, match="a thread touches"):
        pool.close()
    gate.set()
    # The end of the process.
    segments._at_exit()
    assert names_in(register_directory(settings().store)) == []
    PROCESS_GUARD.release(pool)
    pool.close()


async def test_O6_a_forked_child_removes_nothing_of_its_parents(
    module: Module, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pool(settings("file")) as pool:
        await touched(pool.lent)
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: 1)
            segments._at_exit()
        assert len(lent_segments(settings().store)) == 3


async def test_R3_what_a_dead_process_left_is_removed_by_the_next_start_and_told(
    module: Module, settings: Callable[..., Settings], events: Events
) -> None:
    directory = register_directory(settings().store)
    directory.mkdir(mode=0o700)
    (directory / "aa.segment").write_bytes(bytes(8192))
    async with open_pool(settings()):
        assert not (directory / "aa.segment").exists()
    assert events("akv.segment.stale") == [{"segments": 0, "orphans": 1, "bytes": 8192}]
