"""What is refused at the door, with an error that helps; and what is taken because it means the right thing (L6)."""

from typing import Any

import msgspec
import numpy as np
import pytest

from akv import EngineContractError, NotOpenError, Scheduled, SettingsError, open_connector
from akv.halves import Halves
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS

pytestmark = pytest.mark.anyio


async def test_L6_numpys_integers_are_counts_and_travel_in_messages_as_plain_ones() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv, kv.request("r", np.array(TOKENS)) as request:
        offer = await request.lookup(np.int64(0))  # type: ignore[arg-type]
        table = [np.array(pages) for pages in server.allocate(TOKENS)]
        load = request.reserve(offer, np.int64(16), table)  # type: ignore[arg-type]
        completed = await load.wait()
        assert (type(offer.local_tokens), type(completed.tokens)) == (int, int)
        scheduled = Scheduled(request=request, computed_before=np.int64(16), tokens=np.int32(2), pages=table)  # type: ignore[arg-type]
        plan = kv.plan_pass([scheduled])
        msgspec.msgpack.encode((offer, completed, plan))
        kv.drop_pass(plan)


@pytest.mark.parametrize("wrong", [1.5, "4", None, True])
async def test_L6_a_count_that_is_no_integer_is_refused_naming_request_and_count(wrong: Any) -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        with pytest.raises(EngineContractError, match="'r': local_tokens is an integer"):
            await request.lookup(wrong)
        offer = await request.lookup()
        with pytest.raises(EngineContractError, match="'r': honoured_tokens is an integer"):
            request.reserve(offer, wrong, server.allocate(TOKENS))
        with pytest.raises(EngineContractError, match="'r': priority is an integer"):
            request.reserve(offer, 16, server.allocate(TOKENS), priority=wrong)
        with pytest.raises(EngineContractError, match="'r': priority is outside"):
            request.reserve(offer, 16, server.allocate(TOKENS), priority=2**63)
        # Nothing was taken by any of these.
        assert kv.pressure().parked_loads == 0
        assert (await request.reserve(offer, 16, server.allocate(TOKENS)).wait()).tokens == 16
        with pytest.raises(EngineContractError, match="'r': tokens is an integer"):
            kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=wrong, pages=server.allocate(TOKENS))])
        await request.finished()


async def test_L6_page_tables_that_are_none_are_refused() -> None:
    server = FakeServer()
    async with server.open() as kv, kv.request("r", TOKENS) as request:
        with pytest.raises(EngineContractError, match="'r': 0 page tables for a layout of 2"):
            kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=1, pages=None)])  # type: ignore[arg-type]


async def test_a_request_id_is_a_str() -> None:
    server = FakeServer()
    async with server.open() as kv:
        with pytest.raises(EngineContractError, match="id is a str, not a int"):
            kv.open_request(5, TOKENS)  # type: ignore[arg-type]


async def test_X6_a_prompt_in_the_place_of_an_id_is_not_quoted() -> None:
    server = FakeServer()
    async with server.open() as kv:
        with pytest.raises(EngineContractError) as refused:
            kv.open_request([771177], "r")  # type: ignore[arg-type]
        assert "771177" not in str(refused.value)


async def test_a_layout_is_a_layout() -> None:
    server = FakeServer()
    with pytest.raises(SettingsError, match="layout.*NoneType"):
        async with open_connector(server.settings, None, ports=server.ports):  # type: ignore[arg-type]
            pass


async def test_a_connector_is_opened_once() -> None:
    server = FakeServer()
    opening = server.open()
    async with opening:
        with pytest.raises(NotOpenError, match="opened before"):
            async with opening:
                pass
    with pytest.raises(NotOpenError, match="opened before"):
        async with opening:
            pass


async def test_M7_completions_that_nobody_fetches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akv.halves.MOST_UNFETCHED", 3)
    server = FakeServer()
    async with server.open() as kv:
        for number in range(5):
            kv.open_request(str(number), TOKENS).finish()
        halves: Halves = kv._halves
        assert len(halves._completions) == 3
        assert [completion.request_id for completion in kv.completed()] == ["2", "3", "4"]
