"""A small value goes to the pool and back before anybody relies on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from akv.errors import PoolError
from akv.pool import data_path, open_pool
from akv.pool.data_path import check_device, prove_data_path
from akv.pool.mooncake import MooncakePool
from akv.settings import Settings, StoreSettings

pytestmark = pytest.mark.anyio

STORE = StoreSettings(master_address="127.0.0.1:1", local_hostname="here")


async def prove(client: Any) -> str:
    return await prove_data_path(MooncakePool(client, "127.0.0.1:1"), "my ns", STORE)


async def test_a_value_that_comes_back_proves_the_path_and_leaves_nothing(memory_client: Any) -> None:
    assert await prove(memory_client) == "proved"
    assert [call for call, _ in memory_client.calls] == ["put", "get", "remove"]
    (key,) = {key for _, key in memory_client.calls}
    assert key.startswith("my%20ns/probe/")
    assert (memory_client.values, memory_client.buffers) == ({}, {})


async def test_each_process_probes_with_a_key_of_its_own(memory_client: Any) -> None:
    await prove(memory_client)
    await prove(memory_client)
    assert len({key for _, key in memory_client.calls}) == 2


async def test_a_pool_without_room_is_no_fault_and_is_told(memory_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path, "AGAIN_S", 0.0)
    memory_client.codes["put"] = [-200] * 100
    assert await prove(memory_client) == "no_room"
    assert len(memory_client.calls) == data_path.ATTEMPTS
    assert memory_client.buffers == {}


async def test_room_that_an_eviction_makes_is_waited_for(memory_client: Any) -> None:
    memory_client.codes["put"] = [-200, -200]
    assert await prove(memory_client) == "proved"


@pytest.mark.parametrize(("call", "code"), [("put", -800), ("put", -900), ("get", -800), ("get", -704), ("get", -707)])
async def test_one_dead_holder_is_gone_around_and_the_next_value_tried(call: str, code: int, memory_client: Any) -> None:
    memory_client.codes[call] = [code]
    assert await prove(memory_client) == "proved"
    assert memory_client.values == {}, "the first key was removed too"


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ("put", -800, r"put ended with holder_lost \(code -800\)"),
        ("put", -600, r"put ended with refused \(code -600\)"),
        ("get", -800, r"get ended with holder_lost \(code -800\)"),
        ("get", 17, r"get ended with wrong_size \(code 17\)"),
        ("get", data_path.VALUE_BYTES, r"get ended with wrong_size"),  # As long as it should be, and other bytes.
        ("remove", -900, r"removal ended with unavailable"),
        ("remove", -704, r"removal ended with missing"),
    ],
)
async def test_a_value_that_never_comes_back_names_step_code_and_causes(
    call: str, code: int, told: str, memory_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_path, "AGAIN_S", 0.0)
    monkeypatch.setattr(data_path, "HOLDER_LOST_S", -1.0)
    memory_client.codes[call] = [code] * 100
    with pytest.raises(PoolError, match=rf"(?s)127\.0\.0\.1:1 .*{told}.*store\.local_hostname; here it is 'here'.*firewall"):
        await prove(memory_client)
    assert memory_client.buffers == {}


async def test_a_server_starts_beside_one_that_died_however_often_its_value_lands_there(
    memory_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("AGAIN_S", "SELDOM_S"):
        monkeypatch.setattr(data_path, pause, 0.0)
    memory_client.codes["put"] = [-800] * 40
    assert await prove(memory_client) == "proved"


@pytest.mark.parametrize("code", [-900, -704])
async def test_a_server_that_outlasted_a_dead_holder_outlasts_what_else_passes(
    code: int, memory_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("AGAIN_S", "SELDOM_S"):
        monkeypatch.setattr(data_path, pause, 0.0)
    monkeypatch.setattr(data_path, "DEADLINE_S", -1.0)
    # The master takes the dead segment off: what was in it is missing.
    memory_client.codes["put"] = [-800] * 12
    memory_client.codes["get"] = [code] * (data_path.ATTEMPTS - 1)
    assert await prove(memory_client) == "proved"
    memory_client.codes["get"] = [code] * data_path.ATTEMPTS
    with pytest.raises(PoolError, match=f"code {code}"):
        await prove(memory_client)


@pytest.mark.parametrize(("lands", "slept_s"), [(7, [0.02] * 7), (10, [0.02] * 7 + [0.5] * 3)])
async def test_values_that_land_on_the_dead_are_soon_tried_seldom(
    lands: int, slept_s: list[float], memory_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep = anyio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(anyio, "sleep", note)
    memory_client.codes["put"] = [-800] * lands
    assert await prove(memory_client) == "proved"
    assert slept == slept_s


@pytest.mark.parametrize(("code", "limit"), [(-900, "DEADLINE_S"), (-800, "HOLDER_LOST_S")])
async def test_trying_ends_at_the_deadline(code: int, limit: str, memory_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path, limit, -1.0)
    memory_client.codes["put"] = [code] * 100
    with pytest.raises(PoolError):
        await prove(memory_client)
    assert len(memory_client.calls) == 1


@pytest.mark.parametrize(
    ("there", "wanted", "told"),
    [
        ([], "", r"no RDMA device at all \(it has: none\)"),
        ([], "mlx5_0", r"'mlx5_0' \(it has: none\)"),
        (["mlx5_1"], "mlx5_0", r"'mlx5_0' \(it has: mlx5_1\)"),
        (["mlx5_1"], "mlx5_0, mlx5_1", r"'mlx5_0' \(it has: mlx5_1\)"),
    ],
)
def test_rdma_without_its_device_is_refused(there: list[str], wanted: str, told: str, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    store = StoreSettings(protocol="rdma", device_name=wanted)
    with pytest.raises(PoolError, match=told):
        check_device(store, tmp_path)
    with pytest.raises(PoolError):
        check_device(store, tmp_path / "not mounted")


@pytest.mark.parametrize("wanted", ["", "mlx5_0", "mlx5_1,mlx5_0"])
def test_rdma_with_its_device_and_tcp_pass(wanted: str, tmp_path: Path) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    check_device(StoreSettings(protocol="rdma", device_name=wanted), tmp_path)
    check_device(StoreSettings(protocol="tcp", device_name="anything"), tmp_path / "not mounted")


def joining(address: str, segment_bytes: int = 0) -> Settings:
    store = StoreSettings(master_address=address, segment_bytes=segment_bytes, local_buffer_bytes=0)
    return Settings(model_key="m", exit_guard=False, store=store)


@pytest.mark.mooncake
async def test_the_first_process_of_a_pool_starts_though_nobody_lends_yet(
    own_master: tuple[str, int], events: Callable[..., list[dict[str, Any]]]
) -> None:
    address, _ = own_master
    async with open_pool(joining(address)), open_pool(joining(address, 16 << 20)):
        pass
    assert [event["data_path"] for event in events("akv.pool.open", phase="end")] == ["no_room", "proved"]


#: Argument: the master's address. It lends memory under an address that leads nowhere, until its input ends.
UNREACHABLE = """
import sys
from akv.pool import set_up_store
from akv.settings import StoreSettings
pool = set_up_store(StoreSettings(master_address=sys.argv[1], segment_bytes=16 << 20, local_hostname="nohost.invalid"))
print("lent", flush=True)
sys.stdin.read()
pool.close()
"""


@pytest.mark.mooncake
async def test_a_holder_that_cannot_be_reached_is_named_as_a_likely_cause(
    own_master: tuple[str, int],
    events: Callable[..., list[dict[str, Any]]],
    lender: Callable[[str, str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It never comes back: no need to wait as long as for one that died.
    monkeypatch.setattr(data_path, "HOLDER_LOST_S", 1.0)
    address, _ = own_master
    with lender(UNREACHABLE, address):
        with anyio.fail_after(20):
            with pytest.raises(PoolError, match=r"put ended with holder_lost \(code -800\).*hostname that cannot be reached"):
                async with open_pool(joining(address)):
                    pytest.fail("nothing can be stored there")
        (closed,) = events("akv.pool.close", phase="end")
        assert closed["outcome"] == "ok"
