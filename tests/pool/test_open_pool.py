"""Joining a pool and leaving it: what is refused before the client could block, and when nothing is closed."""

import threading
from collections.abc import Callable

import anyio
import pytest

import akv.pool
from akv.errors import PoolError
from akv.pool import MooncakePool, open_pool
from akv.pool.embedded import free_ports
from akv.pool.exit_guard import PROCESS_GUARD
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyState
from akv.settings import Settings, StoreSettings

pytestmark = pytest.mark.anyio


class FakeClient:
    """A client that can be set up, and whose probe waits for the test."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.gate = threading.Event()
        self.inside = threading.Event()
        self.closes = 0

    def MooncakeDistributedStore(self) -> "FakeClient":
        return self

    def setup(self, *arguments: object) -> int:
        self.arguments = arguments
        return self.code

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.inside.set()
        self.gate.wait(5)
        return [0] * len(keys)

    def close(self) -> int:
        self.closes += 1
        return 0


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient()
    monkeypatch.setattr(akv.pool, "load_client_module", lambda: made)
    return made


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


async def test_O7_a_master_that_is_not_there_is_refused_before_the_client_is_set_up(client: FakeClient) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(PoolError, match=f"{address}.*not running"):
        async with open_pool(Settings(model_key="m", store=StoreSettings(master_address=address))):
            pytest.fail("there is no master")
    assert not hasattr(client, "arguments")


@pytest.mark.usefixtures("master_answers")
async def test_a_local_hostname_that_nobody_could_reach_is_refused(client: FakeClient) -> None:
    with pytest.raises(PoolError, match=r"'nohost\.invalid' cannot be resolved.*store\.local_hostname"):
        async with open_pool(settings(local_hostname="nohost.invalid")):
            pytest.fail("the name does not exist")
    assert not hasattr(client, "arguments")


@pytest.mark.usefixtures("master_answers")
async def test_a_setup_that_fails_names_the_address_and_the_likely_causes(client: FakeClient) -> None:
    client.code = -600
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:50051 \(code -600\).*17 bytes.*store\.segment_bytes"):
        async with open_pool(settings(segment_bytes=17)):
            pytest.fail("it was not set up")


@pytest.mark.usefixtures("master_answers")
async def test_the_client_is_set_up_as_the_settings_say_and_closed_at_the_end(client: FakeClient) -> None:
    store = {"segment_bytes": 3 << 20, "local_buffer_bytes": 5, "protocol": "rdma", "device_name": "mlx5_0"}
    async with open_pool(settings(**store)) as pool:
        assert client.arguments == ("127.0.0.1", "P2PHANDSHAKE", 3 << 20, 5, "rdma", "mlx5_0", "127.0.0.1:50051")
        assert client.closes == 0
    assert client.closes == 1
    assert not is_held(pool)


@pytest.mark.usefixtures("master_answers")
async def test_O6_beside_a_running_call_nothing_is_closed_and_the_store_stays_alive(client: FakeClient) -> None:
    async with open_pool(settings()) as pool:
        thread = threading.Thread(target=pool.probe, args=(["a"],))
        thread.start()
        assert client.inside.wait(5)
    assert client.closes == 0
    assert is_held(pool)
    client.gate.set()
    thread.join()
    PROCESS_GUARD.release(pool)


async def test_O6_a_store_whose_master_does_not_answer_is_not_closed(client: FakeClient, master_answers: list[bool]) -> None:
    master_answers += [True, False]
    async with open_pool(settings()) as pool:
        pass
    assert client.closes == 0
    assert is_held(pool)
    PROCESS_GUARD.release(pool)


@pytest.mark.usefixtures("master_answers")
async def test_O6_a_cancelled_block_still_leaves_in_order(client: FakeClient) -> None:
    with anyio.CancelScope() as scope:
        async with open_pool(settings()):
            scope.cancel()
            await anyio.sleep(1)
    assert client.closes == 1
