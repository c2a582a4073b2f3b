"""Beside a drafter: blocks wait for their lookahead, prompts alone are saved, chains end before their prompt (K2, P1, S1)."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from akv import EngineCapabilities, LookupOutcome, Offer, Scheduled, SettingsError
from akv.units import NO_PAGE
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

#: Drafters by the name of a test's case, with how far each looks ahead.
DRAFTERS = {
    "mtp": (EngineCapabilities(drafter="mtp"), 1),
    "eagle3": (EngineCapabilities(drafter="eagle3"), 1),
    "vanilla": (EngineCapabilities(drafter="vanilla_mtp", draft_tokens=6), 6),
    "hidden": (EngineCapabilities(drafter="hidden_state"), 0),
}


def prompt(length: int) -> list[int]:
    return [token * 7 % 11 for token in range(length)]


def drafting(name: str, store: FakeStore | None = None, **arguments: Any) -> FakeServer:
    return FakeServer(capabilities=DRAFTERS[name][0], store=store, **arguments)


async def offer_to(server: FakeServer, tokens: list[int], local_tokens: int = 0) -> Offer:
    async with server.open() as kv:
        return await kv.open_request("r", tokens).lookup(local_tokens)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("length", [3, 4, 5, 16, 17, 18, 19, 20, 21, 22])
async def test_K2_a_prompt_is_saved_and_found_as_far_as_its_lookahead_reaches(name: str, length: int) -> None:
    chain = max(0, length - DRAFTERS[name][1]) // 4
    server, tokens = drafting(name), prompt(length)
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens))
        await request.finished()
    assert server.stored_blocks(tokens) == list(range(chain))
    assert server.wrong_values() == []
    offer = await offer_to(drafting(name, server.store), tokens)
    assert offer.tokens == 4 * min(chain, (length - 1) // 4)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("chunk", [1, 4, 5])
async def test_S1_generated_tokens_are_not_saved_beside_a_drafter(name: str, chunk: int) -> None:
    """Neither as blocks complete nor at the end; nor is a block of the prompt whose lookahead was generated."""
    server, tokens = drafting(name), prompt(20)
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        table = server.allocate(10)
        for before in range(0, 20, chunk):
            part = Scheduled(request=request, computed_before=before, tokens=min(chunk, 20 - before), pages=table)
            plan = kv.plan_pass([part])
            server.write(tokens, table, before // 4, min(20, before + chunk) // 4)
            await kv.after_forward(plan)
        grown = [*tokens, *range(60, 78)]
        for before in range(20, 36, 2):
            # Two tokens a pass, of which one was drafted and accepted.
            request.append(grown[before : before + 2])
            part = Scheduled(request=request, computed_before=before, tokens=1, draft_tokens=1, pages=table)
            await kv.after_forward(kv.plan_pass([part]))
        await request.finished()
    lookahead = DRAFTERS[name][1]
    assert server.stored_blocks(grown) == list(range((20 - lookahead) // 4))
    assert server.wrong_values() == []


@pytest.mark.parametrize("save_generated", [True, False])
async def test_S12_without_a_drafter_generated_tokens_are_saved_if_wanted(save_generated: bool) -> None:
    server, tokens = FakeServer(save_generated=save_generated), prompt(16)
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        table = server.allocate(8)
        await server.compute(kv, request, tokens, table)
        request.append([1, 2, 3, 4])
        part = Scheduled(request=request, computed_before=16, tokens=4, pages=table)
        server.write([*tokens, 1, 2, 3, 4], table, 4)
        await kv.after_forward(kv.plan_pass([part]))
        await request.finished()
    assert server.stored_blocks([*tokens, 1, 2, 3, 4]) == list(range(5 if save_generated else 4))


@pytest.mark.parametrize(
    ("length", "local_tokens", "outcome"),
    [
        (16, 12, LookupOutcome.SKIPPED),
        # Beyond the chain, which has three blocks.
        (16, 16, LookupOutcome.SKIPPED),
        (17, 16, LookupOutcome.SKIPPED),
        (17, 12, LookupOutcome.FULL),
        (16, 15, LookupOutcome.UNALIGNED),
    ],
)
async def test_L1_a_local_match_beyond_the_chain_is_skipped(length: int, local_tokens: int, outcome: LookupOutcome) -> None:
    server = FakeServer.warm(prompt(40), capabilities=DRAFTERS["eagle3"][0])
    offer = await offer_to(server, prompt(length), local_tokens)
    assert (offer.tokens, offer.outcome) == (4 if outcome is LookupOutcome.FULL else 0, outcome)


async def test_L1_S13_a_local_match_beyond_the_chain_lists_no_block_beyond_it() -> None:
    server, tokens = drafting("eagle3"), prompt(16)
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        assert (await request.lookup(12)).outcome is LookupOutcome.SKIPPED
        table = server.allocate(tokens)
        server.write(tokens, table)
        plan = kv.plan_pass([Scheduled(request=request, computed_before=12, tokens=4, pages=table)])
        assert [order.groups[0].blocks for order in plan.saves] == [(0, 1, 2)]
        await kv.after_forward(plan)
        await request.finished()


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [("mtp", "eagle3", 16), ("mtp", "vanilla", 0), ("mtp", "hidden", 0), ("hidden", "none", 16), ("eagle3", "none", 0)],
)
async def test_K2_servers_share_exactly_if_they_look_ahead_as_far(one: str, other: str, shared: int) -> None:
    """As long as their layouts are equal, which of servers with a drafter's layers and without they are not."""
    server, tokens = drafting(one), prompt(19)
    server.put_in_store(tokens)
    reader = FakeServer(store=server.store) if other == "none" else drafting(other, server.store)
    assert (await offer_to(reader, tokens)).tokens == shared


@pytest.mark.parametrize("name", ["eagle3", "vanilla"])
@pytest.mark.parametrize("length", range(25, 30))
@pytest.mark.parametrize("chunk", [4, 7, 40])
async def test_W3_the_closing_pass_is_the_first_behind_the_chains_end(name: str, length: int, chunk: int) -> None:
    capabilities, lookahead = DRAFTERS[name]
    server = WindowServer(windows=((10, 3),), capabilities=capabilities)
    tokens = prompt(length)
    with capture_logs() as events:
        async with server.open() as kv:
            await server.serve(kv, "a", tokens, chunk=chunk)
    assert server.wrong_values() == []
    assert [event["ends"] for event in events if event["event"] == "akv.window.end"] == [1]
    chain = (length - lookahead) // 4
    assert chain in server.ends(tokens)
    there = set(server.store.keys())
    stored = {block for block, keys in enumerate(zip(*server.keys_of(tokens), strict=True)) if keys[0] in there}
    assert stored == set(range(chain))
    other = WindowServer(windows=((10, 3),), capabilities=capabilities, store=server.store)
    async with other.open() as kv:
        offer = await other.serve(kv, "b", tokens, chunk=chunk)
    assert offer.tokens == 4 * min(chain, (length - 1) // 4)


async def test_K2_a_request_that_does_not_read_hashes_its_chain_and_no_more() -> None:
    """With windows a lookup hashes the prompt also where nothing is asked."""
    server = WindowServer(capabilities=DRAFTERS["eagle3"][0], role="producer")
    async with server.open() as kv:
        await server.serve(kv, "a", prompt(24))
    assert server.stored_blocks(prompt(24)) == [2, 3, 4]


@pytest.mark.parametrize("drafter", ["medusa", "two_model"])
async def test_P1_other_drafters_are_refused_by_name_before_anything_is_opened(drafter: str) -> None:
    server = FakeServer(capabilities=EngineCapabilities(drafter=drafter))
    with pytest.raises(SettingsError, match=f"capabilities.drafter' is '{drafter}'"):
        async with server.open():
            pass
    assert server.left_behind() == []


async def test_D1_both_halves_agree_on_the_lookahead() -> None:
    async with drafting("vanilla").open() as kv:
        assert kv._halves.scheduler.terms.lookahead == kv._halves.local_worker.terms.lookahead == 6


async def test_K2_a_block_without_its_page_waits_for_nothing() -> None:
    """The engine need not have a page for what lies behind the chain."""
    server, tokens = drafting("eagle3"), prompt(16)
    async with server.open() as kv:
        request = kv.open_request("r", tokens)
        table = [[*pages[:3], NO_PAGE] for pages in server.allocate(tokens)]
        server.write(tokens, table)
        await kv.after_forward(kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=16, pages=table)]))
        await request.finished()
    assert server.stored_blocks(tokens) == [0, 1, 2]
