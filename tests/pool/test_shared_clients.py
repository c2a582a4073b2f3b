"""Who shares a client of the store, and who closes it (O8, O6); with a client in memory."""

import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import akv.pool
from akv import settings as settings_module
from akv.errors import PoolError, SettingsError
from akv.pool import open_pool
from akv.pool.client_log import CLIENT_LOG
from akv.pool.exit_guard import PROCESS_GUARD
from akv.settings import ClientSettings, Settings, StoreSettings

pytestmark = pytest.mark.anyio

Events = Callable[..., list[dict[str, Any]]]


class Clients:
    """Stands for `mooncake.store`: counts what is set up and closed. `answers`: what the master says when it is asked next."""

    def __init__(self, made: Callable[[], Any]) -> None:
        self._made = made
        self.made: list[Any] = []
        self.answers: list[bool] = []
        #: Held back while set: whoever asks the master.
        self.asked = anyio.Event()
        self.gate: anyio.Event | None = None

    def MooncakeDistributedStore(self) -> Any:
        self.made.append(self._made())
        return self.made[-1]

    def ReplicateConfig(self) -> SimpleNamespace:
        return SimpleNamespace(preferred_segment="")

    @property
    def open(self) -> int:
        return sum(not client.closes for client in self.made)

    async def reach(self, address: str, deadline_s: float) -> None:
        self.asked.set()
        await (anyio.lowlevel.checkpoint() if self.gate is None else self.gate.wait())
        if self.answers and not self.answers.pop(0):
            raise PoolError("it does not answer")


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch, memory_client: Any) -> Clients:
    made = Clients(type(memory_client))
    monkeypatch.setattr(akv.pool, "load_client_module", lambda: made)
    monkeypatch.setattr(akv.pool, "reach_master", made.reach)
    monkeypatch.setattr(CLIENT_LOG, "hold", lambda: False)
    return made


def settings(master: str = "127.0.0.1:50051", **fields: Any) -> Settings:
    store = StoreSettings(master_address=master, **fields.pop("store", {}))
    return Settings(**{"model_key": "m", "exit_guard": False, "store": store, **fields})


async def test_O8_equal_store_settings_share_a_client_whatever_else_differs(clients: Clients, events: Events) -> None:
    async with open_pool(settings()) as one:
        async with open_pool(settings(model_key="drafter", namespace="n", role="consumer", loaders=3)) as other:
            assert other is one
        assert clients.open == 1
        assert PROCESS_GUARD._held.count(one) == 1
        async with open_pool(settings()) as again:
            assert again is one
    assert [client.closes for client in clients.made] == [1]
    assert one not in PROCESS_GUARD._held
    assert len(events("akv.pool.shared")) == 2
    assert len(events("akv.pool.close", phase="end")) == 1


async def test_O8_whoever_came_first_may_leave_first(clients: Clients) -> None:
    first, second = AsyncExitStack(), AsyncExitStack()
    pool = await first.enter_async_context(open_pool(settings()))
    assert await second.enter_async_context(open_pool(settings())) is pool
    await first.aclose()
    assert clients.open == 1
    pool.probe(["a"])
    await second.aclose()
    assert [client.closes for client in clients.made] == [1]


@pytest.mark.parametrize(
    "other", [{"master": "127.0.0.1:50052"}, {"store": {"segment_bytes": 0}}, {"store": {"protocol": "rdma"}}]
)
async def test_O8_other_masters_and_other_store_settings_have_clients_of_their_own(
    other: dict[str, Any], clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(akv.pool, "check_device", lambda store: None)
    async with open_pool(settings()) as one, open_pool(settings(**other)) as another:
        assert one is not another
        assert clients.open == 2
    assert [client.closes for client in clients.made] == [1, 1]


async def test_O8_one_after_the_other_each_sets_up_and_closes(clients: Clients) -> None:
    for number in range(3):
        async with open_pool(settings()):
            assert clients.open == 1
        assert [client.closes for client in clients.made] == [1] * (number + 1)


async def test_O8_many_that_open_and_close_at_once_share_one(clients: Clients) -> None:
    together = anyio.Event()
    arrived: list[Any] = []

    async def connector() -> None:
        async with open_pool(settings()) as pool:
            arrived.append(pool)
            if len(arrived) == 8:
                together.set()
            await together.wait()

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(connector)
    assert len(set(map(id, arrived))) == 1
    assert [client.closes for client in clients.made] == [1]


async def test_O8_who_comes_while_the_last_one_leaves_keeps_the_client_open(clients: Clients) -> None:
    opened: list[Any] = []

    async def joins() -> None:
        async with open_pool(settings()) as pool:
            opened.append(pool)
            assert clients.open == 1

    async with anyio.create_task_group() as group:
        async with open_pool(settings()) as pool:
            gate = clients.gate = anyio.Event()
            clients.asked = anyio.Event()

            async def comes() -> None:
                # The last one has asked the master whether it may close.
                await clients.asked.wait()
                group.start_soon(joins)
                await anyio.wait_all_tasks_blocked()
                clients.gate = None
                gate.set()

            group.start_soon(comes)
    assert opened == [pool]
    assert [client.closes for client in clients.made] == [1]


async def test_O8_who_joins_is_refused_where_the_master_does_not_answer_and_the_others_go_on(clients: Clients) -> None:
    async with open_pool(settings()) as pool:
        clients.answers = [False]
        with pytest.raises(PoolError):
            async with open_pool(settings()):
                raise AssertionError("the master is gone")
        pool.probe(["a"])
        assert clients.open == 1
    assert clients.open == 0


async def test_O8_a_joining_that_fails_leaves_the_next_one_to_try_for_itself(clients: Clients) -> None:
    clients.answers = [False, True]
    with pytest.raises(PoolError):
        async with open_pool(settings()):
            raise AssertionError("the master is gone")
    assert clients.made == []
    async with open_pool(settings()):
        assert clients.open == 1
    assert clients.open == 0


async def test_O6_a_client_that_could_not_be_closed_is_nobodys_and_the_next_one_joins_anew(clients: Clients) -> None:
    async with open_pool(settings()) as left:
        clients.answers = [False]
    assert left in PROCESS_GUARD._held
    async with open_pool(settings()) as fresh:
        assert fresh is not left
    assert [client.closes for client in clients.made] == [0, 1]
    PROCESS_GUARD.release(left)


async def test_O8_a_cancelled_connector_leaves_the_others_their_client(clients: Clients) -> None:
    async with open_pool(settings()) as pool:
        with anyio.move_on_after(0.01) as scope:
            async with open_pool(settings()):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        pool.probe(["a"])
    assert [client.closes for client in clients.made] == [1]


async def test_O8_other_process_wide_settings_are_refused_naming_both(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "_agreed", {})
    monkeypatch.setattr(settings_module, "CLIENT_VARIABLES", {})
    async with open_pool(settings()):
        with pytest.raises(SettingsError, match=r"client\.rpc_timeout_ms.*2500.*1500.*share") as refused:
            # Whatever pool it is for: the variables are the process's.
            async with open_pool(settings("127.0.0.1:1", client=ClientSettings(rpc_timeout_ms=2500))):
                raise AssertionError("the client would run with another connector's settings")
        assert refused.value.field == "client.rpc_timeout_ms"
        assert clients.open == 1
    assert clients.open == 0


def test_O8_loops_in_two_threads_have_clients_of_their_own(clients: Clients) -> None:
    pools: list[Any] = []
    barrier = threading.Barrier(2)

    async def connector() -> None:
        async with open_pool(settings()) as pool:
            pools.append(pool)
            await anyio.to_thread.run_sync(barrier.wait)

    threads = [threading.Thread(target=anyio.run, args=(connector,), kwargs={"backend": name}) for name in ("asyncio", "trio")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, pools))) == 2
    assert [client.closes for client in clients.made] == [1, 1]
    assert all(pool not in PROCESS_GUARD._held for pool in pools)
