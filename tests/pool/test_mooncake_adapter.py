"""The adapter in front of a scripted client: what it passes on, what it refuses, and what it makes of the answers."""

import gc
import importlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from akv.errors import DependencyError, NotOpenError, PoolError
from akv.pool.client import load_client_module
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.mooncake import KEYS_PER_TRANSFER, MooncakePool
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState

PAGE = 64


class ScriptedClient:
    """Answers what the test says, and remembers what it was asked."""

    def __init__(self, answer: Callable[[list[str]], Any] = lambda keys: [0] * len(keys)) -> None:
        self.answer = answer
        self.calls: list[tuple[list[str], list[int], list[int]]] = []
        self.registered: dict[int, int] = {}
        self.closed = 0
        self.register_code = 0
        self.unregister_code = 0

    def batch_is_exist(self, keys: list[str]) -> Any:
        return self._record(keys, [], [])

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> Any:
        return self._record(keys, buffer_ptrs, sizes)

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: Any = None) -> Any:
        return self._record(keys, buffer_ptrs, sizes)

    def batch_get_replica_desc(self, keys: list[str]) -> Any:
        return self._record(keys, [], [])

    def mount_segment(self, path: str, size: int, offset: int, protocol: str, location: str) -> Any:
        return {"ret": -1}

    def get_hostname(self) -> str:
        return ""

    def batch_remove(self, keys: list[str], force: bool) -> Any:
        assert force
        return self._record(keys, [], [])

    def remove_by_regex(self, regex_pattern: str, force: bool) -> Any:
        assert force
        return self._record([regex_pattern], [], [])

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered[buffer_ptr] = size
        return self.register_code

    def unregister_buffer(self, buffer_ptr: int) -> int:
        del self.registered[buffer_ptr]
        return self.unregister_code

    def close(self) -> int:
        self.closed += 1
        return 0

    def _record(self, keys: list[str], pointers: list[int], sizes: list[int]) -> Any:
        self.calls.append((keys, pointers, sizes))
        return self.answer(keys)


def adapter(client: ScriptedClient, *buffers: HostBuffer) -> MooncakePool:
    pool = MooncakePool(client, "127.0.0.1:1")
    for buffer in buffers:
        pool.register(buffer)
    return pool


@pytest.mark.parametrize(("protocol", "lets_go"), [("tcp", True), ("rdma", False), ("", False)])
def test_M3_only_over_tcp_a_call_that_returned_is_known_to_write_no_more(protocol: str, lets_go: bool) -> None:
    pool = MooncakePool(ScriptedClient(lambda keys: keys), "127.0.0.1:1", protocol=protocol)
    assert pool.lets_go_at_return is lets_go


def test_D3_pieces_go_to_the_client_as_addresses_inside_the_buffer(memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(4 * PAGE)
    client = ScriptedClient(lambda keys: [PAGE] * len(keys))
    answers = adapter(client, buffer).get(["a", "b"], buffer, [PAGE, 3 * PAGE], [PAGE, PAGE])
    assert client.calls == [(["a", "b"], [buffer.address + PAGE, buffer.address + 3 * PAGE], [PAGE, PAGE])]
    assert answers == [KeyAnswer(KeyState.OK, PAGE)] * 2


def test_S5_a_key_listed_twice_is_put_once_its_first_piece_and_answered_alike(memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(4 * PAGE)
    client = ScriptedClient(lambda keys: [-200 if key == "b" else 0 for key in keys])
    answers = adapter(client, buffer).put(["b", "a", "b"], buffer, [0, PAGE, 2 * PAGE], [PAGE, PAGE, PAGE])
    assert client.calls == [(["b", "a"], [buffer.address, buffer.address + PAGE], [PAGE, PAGE])]
    assert [answer.state for answer in answers] == [KeyState.NO_SPACE, KeyState.OK, KeyState.NO_SPACE]


def test_values_are_removed_by_force_and_answered_in_order() -> None:
    client = ScriptedClient(lambda _: [0, -704, -703])
    answers = adapter(client).remove(["a", "b", "c"])
    assert [answer.state for answer in answers] == [KeyState.OK, KeyState.MISSING, KeyState.REFUSED]
    assert adapter(client).remove([]) == []
    assert client.calls == [(["a", "b", "c"], [], [])]


def test_a_long_transfer_goes_out_in_parts_and_is_answered_in_order(memory: Callable[[int], HostBuffer]) -> None:
    count = 2 * KEYS_PER_TRANSFER + 3
    buffer = memory(count)
    client = ScriptedClient(lambda keys: [-704 if key.endswith("7") else 1 for key in keys])
    keys = [f"k{index}" for index in range(count)]
    answers = adapter(client, buffer).get(keys, buffer, list(range(count)), [1] * count)
    assert [len(call[0]) for call in client.calls] == [KEYS_PER_TRANSFER, KEYS_PER_TRANSFER, 3]
    assert [pointer - buffer.address for call in client.calls for pointer in call[1]] == list(range(count))
    assert [answer.state is KeyState.MISSING for answer in answers] == [key.endswith("7") for key in keys]


@pytest.mark.parametrize(("code", "state"), [(-900, KeyState.UNAVAILABLE), (-800, KeyState.HOLDER_LOST)])
def test_O7_parts_behind_one_that_nobody_answered_are_not_tried(
    code: int, state: KeyState, memory: Callable[[int], HostBuffer]
) -> None:
    count = 3 * KEYS_PER_TRANSFER
    buffer = memory(count)
    client = ScriptedClient(lambda keys: [code] * len(keys))
    answers = adapter(client, buffer).get([str(index) for index in range(count)], buffer, list(range(count)), [1] * count)
    assert len(client.calls) == 1
    assert answers == [KeyAnswer(state, code)] * count


@pytest.mark.parametrize("raw", [None, [0], [0, 0, 0], [0, None]])
def test_L2_a_reply_of_the_wrong_form_is_refused_for_every_key(raw: Any, memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(2 * PAGE)
    pool = adapter(ScriptedClient(lambda _: raw), buffer)
    refused = [KeyAnswer(KeyState.REFUSED)] * 2
    assert pool.probe(["a", "b"]) == refused
    assert pool.get(["a", "b"], buffer, [0, PAGE], [PAGE, PAGE]) == refused
    assert pool.put(["a", "b"], buffer, [0, PAGE], [PAGE, PAGE]) == refused


def test_L2_an_exception_of_the_client_is_an_answer_per_key() -> None:
    def fail(keys: list[str]) -> Any:
        raise RuntimeError("from C++")

    assert adapter(ScriptedClient(fail)).probe(["a", "b"]) == [KeyAnswer(KeyState.REFUSED)] * 2


def test_no_keys_are_no_call(memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(1)
    client = ScriptedClient()
    pool = adapter(client, buffer)
    assert pool.probe([]) == pool.get([], buffer, [], []) == pool.put([], buffer, [], []) == []
    assert client.calls == []


def test_M1_memory_that_is_not_registered_never_reaches_the_client(memory: Callable[[int], HostBuffer]) -> None:
    registered, stranger = memory(PAGE), memory(PAGE)
    client = ScriptedClient()
    pool = adapter(client, registered)
    for call in (pool.get, pool.put):
        with pytest.raises(ValueError, match="not registered"):
            call(["a"], stranger, [0], [PAGE])
    pool.unregister(registered)
    with pytest.raises(ValueError, match="not registered"):
        pool.get(["a"], registered, [0], [PAGE])
    assert client.calls == []
    assert pool.calls_running == 0


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, PAGE + 1), (PAGE, 1), (1, PAGE), (0, 0), (2, -1)])
def test_M1_a_piece_outside_its_buffer_never_reaches_the_client(
    offset: int, size: int, memory: Callable[[int], HostBuffer]
) -> None:
    buffer = memory(PAGE)
    client = ScriptedClient()
    pool = adapter(client, buffer)
    with pytest.raises(ValueError, match="piece 0"):
        pool.get(["a"], buffer, [offset], [size])
    with pytest.raises(ValueError, match="do not belong together"):
        pool.get(["a"], buffer, [], [])
    with pytest.raises(ValueError, match="piece 1"):
        pool.put(["a", "a"], buffer, [0, offset], [1, size])
    assert client.calls == []


def test_registration_is_refused_aloud_and_taken_back_once(memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(PAGE)
    client = ScriptedClient()
    pool = adapter(client, buffer)
    assert client.registered == {buffer.address: PAGE}
    assert pool.buffers_registered == 1
    pool.unregister(buffer)
    pool.unregister(buffer)
    assert client.registered == {}
    client.register_code = -600
    with pytest.raises(PoolError, match="-600"):
        pool.register(buffer)
    assert pool.buffers_registered == 0


def test_M3_a_buffer_that_the_store_will_not_let_go_stays_on_record(memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(PAGE)
    client = ScriptedClient()
    pool = adapter(client, buffer)
    client.unregister_code = -1
    with pytest.raises(PoolError, match="unregister"):
        pool.unregister(buffer)
    assert pool.buffers_registered == 1


def test_M3_memory_that_the_store_will_not_let_go_outlives_the_pool_and_everybody_else() -> None:
    class Memory:
        """Garbage collected, if it is."""

        address, nbytes = 4096, PAGE

        def view(self) -> memoryview:
            raise AssertionError("nobody reads it")

    buffer = Memory()
    alive = weakref.ref(buffer)
    client = ScriptedClient()
    pool = adapter(client, buffer)
    client.unregister_code = -1
    with pytest.raises(PoolError, match="unregister"):
        pool.unregister(buffer)
    pool.close()
    del pool, buffer
    gc.collect()
    assert alive() is not None, "a peer may still write there"
    PROCESS_GUARD._kept.remove(alive())


def test_O6_a_closed_pool_refuses_and_closes_once(memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(PAGE)
    client = ScriptedClient()
    pool = adapter(client, buffer)
    pool.close()
    pool.close()
    assert client.closed == 1
    for call in (
        lambda: pool.probe(["a"]),
        lambda: pool.get(["a"], buffer, [0], [PAGE]),
        lambda: pool.put(["a"], buffer, [0], [PAGE]),
        lambda: pool.put(["a", "a"], buffer, [0, 0], [PAGE, PAGE]),
        lambda: pool.remove(["a"]),
        lambda: pool.register(buffer),
    ):
        with pytest.raises(NotOpenError):
            call()
    pool.unregister(buffer)
    assert client.calls == []


def test_O6_closing_beside_a_running_call_is_refused() -> None:
    entered, gate = threading.Event(), threading.Event()

    def hang(keys: list[str]) -> list[int]:
        entered.set()
        gate.wait(5)
        return [1] * len(keys)

    client = ScriptedClient(hang)
    pool = adapter(client)
    thread = threading.Thread(target=pool.probe, args=(["a"],))
    thread.start()
    assert entered.wait(5)
    assert pool.calls_running == 1
    with pytest.raises(PoolError, match="1 store calls are running"):
        pool.close()
    assert client.closed == 0
    gate.set()
    thread.join(5)
    pool.close()
    assert client.closed == 1


def test_O6_a_forked_child_is_refused_everything(memory: Callable[[int], HostBuffer]) -> None:
    buffer = memory(PAGE)
    client = ScriptedClient()
    pool = adapter(client, buffer)
    pool._pid = os.getpid() - 1  # What a child sees; a real fork is made in test_forked_child.py.
    for call in (
        lambda: pool.probe(["a"]),
        lambda: pool.get(["a"], buffer, [0], [PAGE]),
        lambda: pool.put(["a"], buffer, [0], [PAGE]),
        lambda: pool.put(["a", "a"], buffer, [0, 0], [PAGE, PAGE]),
        lambda: pool.remove(["a"]),
        lambda: pool.register(buffer),
        lambda: pool.unregister(buffer),
        pool.close,
    ):
        with pytest.raises(NotOpenError, match="forked child"):
            call()
    assert (client.calls, client.closed) == ([], 0)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), r"akv\[mooncake-cpu\].*akv\[mooncake\]"),
        (ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory"), "libibverbs1"),
        (ImportError("libnuma.so.1: cannot open shared object file: No such file or directory"), "libnuma1"),
        (ImportError("libcuda.so.1: cannot open shared object file"), r"driver.*akv\[mooncake-cpu\]"),
    ],
)
def test_a_missing_package_or_library_is_named_with_its_remedy(
    error: ImportError, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        assert name == "mooncake.store"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(DependencyError, match=f"(?s){remedy}.*{str(error)[:10]}") as caught:
        load_client_module()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("answered", "answer"),
    [
        (3, KeyAnswer(KeyState.OK, 3)),
        (0, KeyAnswer(KeyState.OK, 0)),
        (-704, KeyAnswer(KeyState.OK, 0)),
        (-900, KeyAnswer(KeyState.UNAVAILABLE, -900)),
        (-1, KeyAnswer(KeyState.REFUSED, -1)),
        (None, KeyAnswer(KeyState.REFUSED)),
    ],
)
def test_a_prefix_is_taken_literally_and_what_cannot_be_removed_is_told(answered: Any, answer: KeyAnswer) -> None:
    client = ScriptedClient(lambda _: answered)
    assert adapter(client).remove_all("akv1/a.b~c/") == answer
    assert client.calls == [([r"^akv1/a\.b\~c/"], [], [])]
