"""Who shares with whom, end to end: salts, adapters, media, secrets; and who neither reads nor writes (K1, K5, L7, X2, X3)."""

from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from akv import EMPTY_SCOPE, EngineCapabilities, LookupOutcome, Lora, Media, Scheduled, Scope, SettingsError, TokenError
from akv_testing import settle
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.traffic import TOKENS
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio


def picture(content: int, position: int = 9) -> Media:
    return Media(digest=bytes([content]) + bytes(31), position=position, tokens=2)


async def saved(store: FakeStore, scope: Scope, *, reads_cache: bool = True, **settings: Any) -> FakeServer:
    """Compute and save a prompt in a scope, in a server of its own."""
    server = FakeServer(store=store, **settings)
    async with server.open() as kv:
        request = kv.open_request("first", TOKENS, scope, reads_cache=reads_cache)
        table = server.allocate(TOKENS)
        await server.compute(kv, request, TOKENS, table, scope=scope)
        await request.finished()
    return server


async def offered(store: FakeStore, scope: Scope, *, reads_cache: bool = True, **settings: Any) -> tuple[int, LookupOutcome]:
    async with FakeServer(store=store, **settings).open() as kv:
        offer = await kv.open_request("second", TOKENS, scope, reads_cache=reads_cache).lookup()
        return offer.tokens, offer.outcome


OWN = Scope(salt="a", lora=Lora(7, "r1"), media=(picture(1),))


@pytest.mark.parametrize(
    ("other", "tokens"),
    [
        (OWN, 16),
        (Scope(salt="b", lora=Lora(7, "r1"), media=(picture(1),)), 0),
        (Scope(lora=Lora(7, "r1"), media=(picture(1),)), 0),
        (Scope(salt="a", lora=Lora(8, "r1"), media=(picture(1),)), 0),
        (Scope(salt="a", lora=Lora(7, "r2"), media=(picture(1),)), 0),
        (Scope(salt="a", lora=Lora(7), media=(picture(1),)), 0),
        (Scope(salt="a", media=(picture(1),)), 0),
        # Up to the picture the text is the same; it begins in the third block of four.
        (Scope(salt="a", lora=Lora(7, "r1"), media=(picture(2),)), 8),
        (Scope(salt="a", lora=Lora(7, "r1"), media=(picture(1, position=8),)), 8),
        (Scope(salt="a", lora=Lora(7, "r1")), 8),
        (EMPTY_SCOPE, 0),
    ],
)
async def test_K1_scopes_share_what_lies_before_their_difference_and_nothing_else(other: Scope, tokens: int) -> None:
    server = await saved(FakeServer().store, OWN)
    assert server.stored_blocks(TOKENS, OWN) == [0, 1, 2, 3]
    assert server.wrong_values() == []
    assert (await offered(server.store, other))[0] == tokens


@pytest.mark.parametrize(("drafter", "position", "tokens"), [("none", 12, 12), ("none", 11, 8), ("eagle3", 12, 8)])
async def test_K1_two_images_share_what_lies_before_the_first_block_that_they_touch(
    drafter: str, position: int, tokens: int
) -> None:
    """Their digests end alike, for servers that compare no more. Beside the drafter what stands right behind a block touches
    it, too.
    """
    one, other = (Media(digest=bytes([content]) + bytes(31), position=position, tokens=3) for content in (1, 2))
    assert one.digest.hex()[-4:] == other.digest.hex()[-4:]
    capabilities = EngineCapabilities(drafter=drafter)
    server = await saved(FakeServer().store, Scope(media=(one,)), capabilities=capabilities)
    assert await offered(server.store, Scope(media=(one,)), capabilities=capabilities) == (16, LookupOutcome.FULL)
    assert (await offered(server.store, Scope(media=(other,)), capabilities=capabilities))[0] == tokens


async def test_K1_two_salts_have_no_hit_in_lookup_save_or_load() -> None:
    store, mine, theirs = FakeServer().store, Scope(salt="a"), Scope(salt="b")
    await saved(store, mine)
    mines = set(store.keys())
    server = FakeServer(store=store)
    # What one tenant's saves brought to the pool is not taken for the other's, who saves its own.
    async with server.open() as kv:
        for scope in (mine, theirs):
            request = kv.open_request("r", TOKENS, scope)
            assert (await request.lookup()).tokens == (16 if scope is mine else 0)
            table = server.allocate(TOKENS)
            await server.compute(kv, request, TOKENS, table, scope=scope)
            await request.finished()
    assert set(store.keys()) - mines == {key for keys in server.keys_of(TOKENS, theirs) for key in keys}
    server = FakeServer(store=store)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS, theirs)
        table = server.allocate(TOKENS)
        await request.reserve(await request.lookup(), 16, table).wait()
        content = [server.device.read_page(0, page) for page in table[0][:4]]
        assert content == [server.content(block, 0) for block in server.hashes(TOKENS, theirs)[:4]]


@pytest.mark.parametrize("secret", ["", "k", "other"])
async def test_X2_servers_share_exactly_if_they_have_one_key_secret(secret: str) -> None:
    store = FakeServer().store
    await saved(store, EMPTY_SCOPE, key_secret="k")
    assert (await offered(store, EMPTY_SCOPE, key_secret=secret))[0] == (16 if secret == "k" else 0)


@pytest.mark.parametrize("windows", [(), ((10, 0),)])
async def test_K5_media_without_digests_neither_read_nor_write_and_are_warned_of_once(
    windows: Sequence[tuple[int, int]],
) -> None:
    server = WindowServer.warm(TOKENS, windows=windows)
    before = set(server.store.keys())
    with capture_logs() as events:
        async with server.open() as kv:
            for number in range(3):
                request = kv.open_request(str(number), TOKENS, Scope(media=None))
                offer = await request.lookup()
                assert (offer.tokens, offer.outcome) == (0, LookupOutcome.MEDIA_UNKNOWN)
                table = server.allocate(TOKENS)
                plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(TOKENS), pages=table)])
                assert plan.saves == ()
                await kv.after_forward(plan)
                request.append([7] * 8)
                plan = kv.plan_pass([Scheduled(request=request, computed_before=len(TOKENS), tokens=1, pages=table)])
                await kv.after_forward(plan)
                await request.finished()
                # Nor is time spent on hashes that nobody may use.
                assert request._record.chain.hash_up_to(0) == 0
            # Others are served as ever.
            assert (await kv.open_request("text", TOKENS).lookup()).outcome is not LookupOutcome.MEDIA_UNKNOWN
    assert set(server.store.keys()) == before
    assert not [call for call in server.pool.calls if call.operation == "put"]
    assert [event["event"] for event in events].count("akv.request.media_unknown") == 1
    assert [event["reason"] for event in events if event["event"] == "akv.request.excluded"] == ["media_unknown"] * 3


async def test_K5_a_prompt_with_unknown_media_is_no_recent_chain() -> None:
    """Its hashes are those of its text alone."""
    async with FakeServer().open() as kv:
        recent = kv._halves.scheduler._lookup.recent
        kv.open_request("media", TOKENS, Scope(media=None)).finish()
        assert len(recent) == 0
        kv.open_request("text", TOKENS).finish()
        assert len(recent) == 1


@pytest.mark.parametrize("scope", [EMPTY_SCOPE, Scope(salt=""), Scope(lora=Lora(1))])
async def test_X3_without_a_salt_nothing_is_read_or_written_where_one_is_required(scope: Scope) -> None:
    store = FakeServer.warm(TOKENS).store
    before = set(store.keys())
    assert await offered(store, scope, require_salt=True) == (0, LookupOutcome.UNSALTED)
    await saved(store, scope, require_salt=True)
    assert set(store.keys()) == before
    with_salt = Scope(salt="a", lora=scope.lora)
    await saved(store, with_salt, require_salt=True)
    assert await offered(store, with_salt, require_salt=True) == (16, LookupOutcome.FULL)


async def test_L7_a_request_that_does_not_read_is_saved() -> None:
    server = await saved(FakeServer().store, EMPTY_SCOPE, reads_cache=False)
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert await offered(server.store, EMPTY_SCOPE, reads_cache=False) == (0, LookupOutcome.NOT_READING)
    assert await offered(server.store, EMPTY_SCOPE) == (16, LookupOutcome.FULL)


async def test_L7_a_dummy_request_is_ignored_everywhere() -> None:
    """Its pages need not be its own: a batch is filled with many that all write one page."""
    server = FakeServer()
    with capture_logs() as events:
        async with server.open() as kv:
            requests = [kv.open_request(f"dummy-{number}", [0] * 18, dummy=True) for number in range(3)]
            assert [(await request.lookup()).outcome for request in requests] == [LookupOutcome.NOT_READING] * 3
            parts = [Scheduled(request=r, computed_before=0, tokens=18, pages=[[0] * 5, [99] * 5]) for r in requests]
            plan = kv.plan_pass(parts)
            assert plan.saves == ()
            await kv.after_forward(plan)
            for request in requests:
                assert await request.finished() == ()
            await settle()
    assert server.pool.calls == []
    assert not [e for e in events if e["event"].startswith(("akv.lookup", "akv.request", "akv.save"))]


async def test_L7_a_dummy_request_beside_windows_takes_no_slot_and_lives_as_any_other() -> None:
    server = WindowServer.warm(TOKENS, windows=((10, 3),), retention_tokens=8)
    before = set(server.store.keys())
    with capture_logs() as events:
        async with server.open() as kv:
            request = kv.open_request("dummy", TOKENS, dummy=True)
            for _ in range(2):
                assert (await request.lookup()).tokens == 0
                plan = kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=18, pages=[[0] * 5, [99] * 5])])
                ring = kv.pressure().ring
                assert ring is not None
                assert (plan.saves, ring.free) == ((), ring.slots)
                await kv.after_forward(plan)
                request.append([1])
                assert await request.preempted() == ()
            assert await request.cancel() == ()
            kv.open_request("dummy", TOKENS, dummy=True)
            await kv.reset("r2")
    assert (server.pool.calls, set(server.store.keys())) == ([], before)
    assert not [e for e in events if e["event"].startswith(("akv.lookup", "akv.save", "akv.window", "akv.snapshot"))]


@pytest.mark.parametrize("dummy", [True, False])
async def test_L7_a_task_of_its_own_may_run_a_dummy_request_too(dummy: bool) -> None:
    server = FakeServer()
    async with server.open() as kv:
        async with kv.request("r", TOKENS, dummy=dummy) as request:
            await request.lookup()
            await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await settle()
    assert bool(server.pool.calls) is bool(server.stored_blocks(TOKENS)) is not dummy


async def test_K1_a_scope_that_cannot_be_is_refused_before_anything_is_opened() -> None:
    server = FakeServer()
    async with server.open() as kv:
        for scope in (Scope(media=(picture(1, 17),)), Scope(media=(picture(1), picture(2))), Scope(lora=Lora(2**63))):
            with pytest.raises(TokenError, match="nothing was opened"):
                kv.open_request("r", TOKENS, scope)
        with pytest.raises(TokenError, match="position 17"):
            kv.open_request("r", [*TOKENS[:17], 2**63])
        # The id is free, and ids up to the end of int64 are tokens as any other.
        request = kv.open_request("r", [2**31, 2**63 - 1, *TOKENS])
        with pytest.raises(TokenError, match="position 21"):
            request.append([1, 2**63])
        request.append([1])
        await request.finished()


async def test_K1_trtllms_hashes_take_no_revision_of_an_adapter() -> None:
    trtllm: dict[str, Any] = {"key_format": "trtllm", "pin_model_key": True}
    server = FakeServer(**trtllm)
    with capture_logs() as events:
        async with server.open() as kv:
            with pytest.raises(SettingsError, match="revision"):
                kv.open_request("r", TOKENS, Scope(lora=Lora(7, "r1")))
            await kv.open_request("r", TOKENS, Scope(lora=Lora(7))).finished()
    assert [event["log_level"] for event in events if event["event"] == "akv.keys.foreign"] == ["warning"]
    scope = Scope(media=(picture(1),))
    await saved(server.store, scope, **trtllm)
    assert await offered(server.store, scope, **trtllm) == (16, LookupOutcome.FULL)
    # There a picture counts from the first block on.
    assert (await offered(server.store, Scope(media=(picture(2),)), **trtllm))[0] == 0


async def test_X6_no_salt_or_secret_is_in_any_event_or_error() -> None:
    with capture_logs() as events:
        store = FakeServer().store
        secret: dict[str, Any] = {"key_secret": "hunter2", "require_salt": True}
        await saved(store, Scope(salt="hunter3"), **secret)
        assert (await offered(store, Scope(salt="hunter3"), **secret))[0] == 16
    assert "hunter" not in str(events)
    assert events
