"""Joining a pool and leaving it: what is refused before the client could block, and when nothing is closed."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import akv.pool
from akv.errors import PoolError
from akv.pool import MooncakePool, open_embedded_master, open_pool
from akv.pool.data_path import check_device
from akv.pool.embedded import free_ports
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.transfers import PROCESS_BUDGET, QUEUE_VARIABLE
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyState
from akv.settings import ClientSettings, Settings, StoreSettings
from akv_testing.processes import children_of, command_of

pytestmark = pytest.mark.anyio

Events = Callable[..., list[dict[str, Any]]]


class Log:
    """Counts who holds the client's log."""

    def __init__(self) -> None:
        self.holders = 0

    def hold(self) -> bool:
        self.holders += 1
        return True

    def release(self) -> None:
        self.holders -= 1

    def read(self) -> None:
        """Nothing is read from a store that is none."""


@pytest.fixture
def client_log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Stands for the process's own, which needs the client's library."""
    log = Log()
    monkeypatch.setattr(akv.pool, "CLIENT_LOG", log)
    return log


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, memory_client: Any, client_log: Log) -> Any:
    """Stands for `mooncake.store` and its client."""
    monkeypatch.setattr(akv.pool, "load_client_module", lambda: memory_client)
    return memory_client


@pytest.fixture
def master_answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the master says the next times it is asked whether it is there; True when the list is at its end."""
    answers: list[bool] = []

    async def reach(address: str, deadline_s: float) -> None:
        await anyio.lowlevel.checkpoint()
        if answers and not answers.pop(0):
            raise PoolError("it does not answer")

    monkeypatch.setattr(akv.pool, "reach_master", reach)
    return answers


def settings(**store: object) -> Settings:
    return Settings(model_key="m", exit_guard=False, store=StoreSettings(master_address="127.0.0.1:50051", **store))  # type: ignore[arg-type]


def is_held(pool: MooncakePool) -> bool:
    return any(held is pool for held in PROCESS_GUARD._held)


def child_command(pid: int) -> list[str]:
    """The command of a process's one child."""
    (child,) = children_of(pid)
    return command_of(child)


@pytest.mark.mooncake
async def test_an_embedded_pool_holds_pages_and_leaves_no_child(memory: Callable[[int], HostBuffer]) -> None:
    embedded = Settings(model_key="m", pool="embedded", exit_guard=False, store=StoreSettings(segment_bytes=16 << 20))
    async with open_pool(embedded) as pool:
        assert pool.address.startswith("127.0.0.1:")
        buffer = memory(2000)
        buffer.view()[:1000] = bytes(range(250)) * 4
        pool.register(buffer)
        assert pool.put(["a"], buffer, [0], [1000])[0].state is KeyState.OK
        assert pool.get(["a"], buffer, [1000], [1000])[0].state is KeyState.OK
        assert buffer.view()[:1000] == buffer.view()[1000:]
        pool.unregister(buffer)
        assert is_held(pool)
    assert not is_held(pool)


async def test_O7_a_master_that_is_not_there_is_refused_before_the_client_is_set_up(client: Any) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(PoolError, match=f"{address}.*not running"):
        async with open_pool(Settings(model_key="m", store=StoreSettings(master_address=address))):
            pytest.fail("there is no master")
    assert client.setup_arguments is None


@pytest.mark.usefixtures("master_answers")
async def test_a_local_hostname_that_nobody_could_reach_is_refused(client: Any) -> None:
    with pytest.raises(PoolError, match=r"'nohost\.invalid' cannot be resolved.*store\.local_hostname"):
        async with open_pool(settings(local_hostname="nohost.invalid")):
            pytest.fail("the name does not exist")
    assert client.setup_arguments is None


@pytest.mark.usefixtures("master_answers")
async def test_a_setup_that_fails_names_the_address_and_the_likely_causes(client: Any) -> None:
    client.setup_code = -600
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:50051 \(code -600\).*17 bytes.*store\.segment_bytes"):
        async with open_pool(settings(segment_bytes=17)):
            pytest.fail("it was not set up")


@pytest.mark.usefixtures("master_answers")
async def test_the_client_is_set_up_as_the_settings_say_and_closed_at_the_end(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(akv.pool, "check_device", lambda store: None)
    store = {"segment_bytes": 3 << 20, "local_buffer_bytes": 5, "protocol": "rdma", "device_name": "mlx5_0"}
    async with open_pool(settings(**store)) as pool:
        assert client.setup_arguments == ("127.0.0.1", "P2PHANDSHAKE", 3 << 20, 5, "rdma", "mlx5_0", "127.0.0.1:50051")
        assert client.closes == 0
    assert client.closes == 1
    assert not is_held(pool)


@pytest.mark.usefixtures("master_answers")
async def test_O6_beside_a_running_call_nothing_is_closed_and_the_store_stays_alive(client: Any) -> None:
    inside, gate = threading.Event(), threading.Event()

    def hang(keys: list[str]) -> list[int]:
        inside.set()
        gate.wait(5)
        return [0] * len(keys)

    client.batch_is_exist = hang
    async with open_pool(settings()) as pool:
        thread = threading.Thread(target=pool.probe, args=(["a"],))
        thread.start()
        assert inside.wait(5)
    assert client.closes == 0
    assert is_held(pool)
    gate.set()
    thread.join()
    PROCESS_GUARD.release(pool)


async def test_O6_a_store_whose_master_does_not_answer_is_not_closed(
    client: Any, client_log: Log, master_answers: list[bool]
) -> None:
    master_answers += [True, False]
    async with open_pool(settings()) as pool:
        pass
    assert client.closes == 0
    assert client_log.holders == 1, "it goes on logging"
    assert is_held(pool)
    PROCESS_GUARD.release(pool)


@pytest.mark.usefixtures("master_answers")
async def test_O6_a_cancelled_block_still_leaves_in_order(client: Any) -> None:
    with anyio.CancelScope() as scope:
        async with open_pool(settings()):
            scope.cancel()
            await anyio.sleep(1)
    assert client.closes == 1


@pytest.mark.usefixtures("master_answers")
async def test_O7_rdma_without_a_device_is_refused_before_the_client_is_set_up(
    client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check_device, "__defaults__", (tmp_path,))
    with pytest.raises(PoolError, match="no RDMA device"):
        async with open_pool(settings(protocol="rdma")):
            pytest.fail("there is no device")
    assert client.setup_arguments is None


@pytest.mark.usefixtures("master_answers")
async def test_what_a_process_says_as_it_joins_and_leaves(client: Any, events: Events) -> None:
    async with open_pool(settings()):
        (begin, end) = events("akv.pool.open")
        assert (begin["phase"], end["phase"], end["outcome"], end["data_path"]) == ("begin", "end", "ok", "proved")
        assert end["client_version"] != "unknown"
        assert events("akv.pool.close") == []
    assert [event["phase"] for event in events("akv.pool.close")] == ["begin", "end"]
    assert client.values == {}


@pytest.mark.usefixtures("master_answers", "client")
async def test_X6_the_clients_log_is_held_while_a_pool_is_open_unless_the_settings_say_otherwise(
    client_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(akv.pool, "prepare_client_environment", lambda asked: {})
    async with open_pool(settings()):
        assert client_log.holders == 1
    assert client_log.holders == 0
    async with open_pool(msgspec.structs.replace(settings(), client=ClientSettings(capture_log=False))):
        assert client_log.holders == 0


@pytest.mark.usefixtures("master_answers")
async def test_a_pool_that_fails_its_proof_is_closed_again_and_the_log_let_go(
    client: Any, client_log: Log, events: Events
) -> None:
    client.codes["put"] = [-600]
    with pytest.raises(PoolError, match="did not go there and back"):
        async with open_pool(settings()):
            pytest.fail("it does not work")
    assert client.closes == 1
    assert [event["outcome"] for event in events("akv.pool.open", phase="end")] == ["error"]
    assert client_log.holders == 0


@pytest.mark.usefixtures("master_answers")
async def test_joining_can_be_cancelled_and_leaves_nothing(
    client: Any, client_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prove(*_: object) -> None:
        scope.cancel()
        await anyio.sleep(1)

    monkeypatch.setattr(akv.pool, "prove_data_path", prove)
    with anyio.CancelScope() as scope:
        async with open_pool(settings()):
            pytest.fail("it was cancelled")
    assert scope.cancelled_caught
    assert client.closes == 1
    assert client_log.holders == 0


@pytest.mark.usefixtures("master_answers")
async def test_O8_client_variables_come_first_and_bound_the_transfers(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    bound: list[int] = []

    def prepare(asked: ClientSettings) -> dict[str, str]:
        order.append("prepare")
        return {QUEUE_VARIABLE: "1000"}

    def load() -> Any:
        order.append("import")
        return client

    monkeypatch.setattr(akv.pool, "prepare_client_environment", prepare)
    monkeypatch.setattr(akv.pool, "load_client_module", load)
    monkeypatch.setattr(PROCESS_BUDGET, "lower_to", bound.append)
    async with open_pool(settings()):
        pass
    assert order[:2] == ["prepare", "import"]
    assert bound == [1000]


@pytest.mark.mooncake
@pytest.mark.usefixtures("client")
async def test_D4_an_embedded_pools_master_grants_the_lease_that_the_connector_counts_on(events: Events) -> None:
    embedded = Settings(model_key="m", pool="embedded", exit_guard=False, lease_s=2.5004)
    async with open_pool(embedded):
        command = child_command(events("akv.pool.embedded.start")[-1]["pid"])
        assert "--default_kv_lease_ttl=2501" in command, "in whole milliseconds, and no less than was asked for"


@pytest.mark.mooncake
@pytest.mark.parametrize("killed", [False, True])
async def test_an_embedded_master_tells_of_its_start_and_whether_its_end_was_expected(killed: bool, events: Events) -> None:
    async with open_embedded_master() as address:
        (begin, end) = events("akv.pool.embedded.start")
        assert (begin["phase"], end["phase"], end["outcome"]) == ("begin", "end", "ok")
        assert end["master_address"] == address
        assert events("akv.pool.embedded.exit") == []
        if killed:
            os.kill(end["pid"], signal.SIGKILL)
            # Nothing announces it: the loop hears of its child's end some time later.
            await anyio.sleep(0.5)
    (ended,) = events("akv.pool.embedded.exit")
    assert (ended["pid"], ended["expected"]) == (end["pid"], not killed)
