"""Ranks that do not fit together are refused before anything is asked of them (D1)."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from akv import SettingsError, open_connector
from akv.ranks import open_scheduler, open_worker
from akv.values.messages import MESSAGE_VERSION, RankHello
from akv_testing.ports import fake_ports, tiny_layout
from akv_testing.ranked_server import RankedServer, ranked_layout

pytestmark = pytest.mark.anyio

LAYOUT = ranked_layout(tiny_layout(groups=2), 2)
SETTINGS: dict[str, Any] = {"model_key": "m", "staging_buffer_bytes": 4096, "store": {"master_address": "127.0.0.1:1"}}


async def hellos_of(*ranks: int, layouts: Sequence[Any] = (), pages: Sequence[int] = (), **settings: Any) -> list[bytes]:
    """What ranks of these numbers say of themselves; `settings` are those of the last one alone."""
    hellos = []
    async with AsyncExitStack() as stack:
        for number, rank in enumerate(ranks):
            layout = layouts[number] if layouts else LAYOUT
            own = SETTINGS | (settings if number == len(ranks) - 1 else {})
            ports = fake_ports(layout, pages=pages[number] if pages else 64)
            worker = await stack.enter_async_context(open_worker(own, layout, rank=rank, ports=ports))
            hellos.append(worker.hello)
    return hellos


async def refused(hellos: Sequence[bytes], **settings: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        async with open_scheduler(SETTINGS | settings, hellos, ports=fake_ports(LAYOUT)):
            raise AssertionError("it opened")
    return str(caught.value)


def as_version(hello: bytes, version: int) -> bytes:
    said = msgspec.msgpack.decode(hello, type=RankHello)
    return msgspec.msgpack.encode(msgspec.structs.replace(said, terms=msgspec.structs.replace(said.terms, version=version)))


async def test_D1_ranks_that_agree_are_served_in_whatever_order_they_come() -> None:
    for hellos in (await hellos_of(0, 1), await hellos_of(1, 0)):
        async with open_scheduler(SETTINGS, hellos, ports=fake_ports(LAYOUT)) as kv:
            assert kv.take_orders() == b""
            assert kv.completed() == []


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ({"model_key": "other"}, "terms.key_space"),
        ({"namespace": "other"}, "terms.key_space"),
        ({"revision": "other"}, "terms.key_space"),
        ({"role": "producer"}, "terms.role"),
    ],
)
async def test_D1_a_rank_with_other_settings_is_refused_and_both_values_are_named(differs: dict[str, Any], named: str) -> None:
    said = await refused(await hellos_of(0, 1, **differs))
    assert named in said
    assert next(iter(differs.values())) in said
    assert "same settings" in said


async def test_D1_a_scheduler_with_settings_of_its_own_is_refused_by_ranks_that_agree_with_each_other() -> None:
    assert "terms.role" in await refused(await hellos_of(0, 1), role="consumer")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_D1_ranks_of_different_layouts_are_refused(order: tuple[int, int]) -> None:
    other = ranked_layout(tiny_layout(groups=2, bytes_per_region=16), 2)
    hellos = await hellos_of(0, 1, layouts=[LAYOUT, other])
    assert "terms.layout" in await refused([hellos[rank] for rank in order])


async def test_D1_ranks_with_caches_of_different_sizes_are_refused() -> None:
    said = await refused(await hellos_of(0, 1, pages=[64, 32]))
    assert "terms.page_counts" in said
    assert "32" in said
    assert "64" in said


async def test_D1_a_rank_of_another_version_is_refused() -> None:
    hellos = await hellos_of(0, 1)
    said = await refused([hellos[0], as_version(hellos[1], MESSAGE_VERSION + 1)])
    assert "terms.version" in said
    assert str(MESSAGE_VERSION + 1) in said


async def test_D1_a_rank_that_is_missing_or_comes_twice_is_refused() -> None:
    two = await hellos_of(0, 1)
    three = await hellos_of(2, layouts=[ranked_layout(tiny_layout(groups=2), 4)])
    for ranks, said in {
        "[0]": await refused(two[:1]),
        "[1]": await refused(two[1:]),
        "[0, 0]": await refused([two[0], two[0]]),
        "[0, 0, 1]": await refused([*two, two[0]]),
        "[0, 1, 2]": await refused([*two, *three]),
    }.items():
        assert ranks in said
        assert "from 0 to" in said
    assert "one rank at least" in await refused([])


@pytest.mark.parametrize("garbage", [b"", b"hello", b"\x80", msgspec.msgpack.encode({"rank": 0})])
async def test_D1_what_is_no_hello_is_refused(garbage: bytes) -> None:
    (hello, _) = await hellos_of(0, 1)
    assert "Worker.hello" in await refused([hello, garbage])


@pytest.mark.parametrize("rank", [-1, 2])
async def test_D1_a_rank_that_the_layout_does_not_have_is_refused_where_it_is_opened(rank: int) -> None:
    with pytest.raises(SettingsError, match=rf"rank.*{rank}"):
        async with open_worker(SETTINGS, LAYOUT, rank=rank, ports=fake_ports(LAYOUT)):
            raise AssertionError("it opened")


async def test_D1_a_connector_for_one_rank_names_what_serves_several() -> None:
    with pytest.raises(SettingsError, match=r"open_scheduler\(\).*open_worker\(\)"):
        async with open_connector(SETTINGS, LAYOUT, ports=fake_ports(LAYOUT)):
            raise AssertionError("it opened")


async def test_D1_a_pool_of_each_process_of_its_own_is_refused_unless_its_ports_are_given() -> None:
    embedded = {"model_key": "m", "pool": "embedded"}
    with pytest.raises(SettingsError, match="akv master"):
        async with open_worker(embedded, LAYOUT, rank=0):
            raise AssertionError("it opened")
    with pytest.raises(SettingsError, match="akv master"):
        async with open_scheduler(embedded, await hellos_of(0, 1)):
            raise AssertionError("it opened")
    # `RankedServer` is such a server on given ports.
    server = RankedServer()
    async with server.open() as kv:
        assert kv.settings.pool == "embedded"
    assert server.left_behind() == []


async def test_D1_one_rank_is_served_by_the_halves_of_several_too() -> None:
    server = RankedServer(world=1)
    tokens = list(range(18))
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens))
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2, 3]
    assert server.left_behind() == []
