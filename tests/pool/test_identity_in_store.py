"""Whose pages these are, on a real pool: tenants, and values that another client wrote, with windows and all (K1, K5, S11)."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from akv import EngineContractError, LookupOutcome, Scheduled, Scope, Settings, check_settings, open_connector
from akv.plan.identity import Hashing
from akv.plan.keys import KeySpace
from akv.pool import MooncakePool, open_pool
from akv.ports.pool import KeyState
from akv_testing.engine import TINY_SLIDING, Engine, EngineConfig, Model, Pages, Result, capabilities_of, open_engine

pytestmark = [pytest.mark.anyio, pytest.mark.mooncake]

Events = Callable[..., list[dict[str, Any]]]

#: Five blocks of eight, and one token.
TOKENS = [7 * position % 251 for position in range(41)]
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "keep_logits": True, "keep_pages": True}
#: Chunks of one block: wherever a request resumes the chunks behind are those of a cold run (Q1).
CONFIG = EngineConfig(
    model=TINY_SLIDING, tokens_per_block=8, pages=64, chunk_tokens=8, max_tokens_per_pass=64, max_running=8,
    window_retention_tokens=64,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "off": {},
    "checksum": {"integrity": "checksum"},
    "mac": {"integrity": "mac", "integrity_secret": "hunter2"},
}
#: Layer groups of the model: full attention, a window of 20 with sinks of 3, a window of 50. And blocks that a load reads.
PLACES = [(0, 1), (1, 0), (1, 4), (2, 3)]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY_SLIDING)


@asynccontextmanager
async def served(settings: Settings, model: Model) -> AsyncIterator[Engine]:
    """An engine with empty caches. It lends nothing, so that its pages outlive it."""
    pages = Pages(CONFIG)
    async with (
        open_connector(settings, pages.layout, pages.caches, capabilities=capabilities_of(CONFIG)) as kv,
        open_engine(CONFIG, model=model, pages=pages, kv=kv) as engine,
    ):
        yield engine


def settings_of(master: str, name: str, kind: str) -> Settings:
    return check_settings(
        {
            "model_key": name,
            "store": {"master_address": master, "segment_bytes": 0},
            "staging_buffer_bytes": "1MiB",
            "lookup_deadline_s": 60.0,
            "load_deadline_s": 60.0,
            "exit_guard": False,
            **KINDS[kind],
        }
    )


def overwrite(
    pool: MooncakePool, memory: Callable[..., Any], settings: Settings, tokens: list[int], group: int, block: int
) -> str:
    """What another client of the pool can do to a value: returns its key."""
    layout = Pages(CONFIG).layout
    block_hash = Hashing(8).chain(Scope(), tokens).hashes(0, 5)[block]
    (key,) = KeySpace.of_settings(settings, layout).keys(group, [block_hash])
    size = layout.groups[group].bytes_per_page + (0 if settings.integrity == "off" else 16)
    buffer = memory(size)
    pool.register(buffer)
    try:
        assert pool.get([key], buffer, [0], [size])[0].state is KeyState.OK
        buffer.view()[size // 3] ^= 1
        assert pool.remove([key])[0].state is KeyState.OK
        assert pool.put([key], buffer, [0], [size])[0].state is KeyState.OK
    finally:
        pool.unregister(buffer)
    return key


def wrong_pages(result: Result, cold: Result) -> list[tuple[int, int]]:
    """Pages, by layer group and block, that a run has and whose bytes are not those of a cold run."""
    return [
        (group, block)
        for group, columns in enumerate(zip(result.page_digests, cold.page_digests, strict=True))
        for block, (got, expected) in enumerate(zip(*columns, strict=True))
        if got and got != expected
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_S11_Q1_a_page_that_another_client_overwrote_is_found_with_integrity_and_not_without(
    kind: str, master: str, pool: MooncakePool, memory: Any, model: Model, new_key: Any, events: Events
) -> None:
    settings = settings_of(master, new_key(), kind)
    async with open_pool(settings):  # for the whole test: each engine's connector shares the client
        for number, (group, block) in enumerate(PLACES):
            tokens = [(token + number) % 251 for token in TOKENS]
            async with served(settings, model) as engine:
                cold = await engine.generate("cold", tokens, **OPTIONS)
            key = overwrite(pool, memory, settings, tokens, group, block)
            async with served(settings, model) as engine:
                hurt = await engine.generate("hurt", tokens, **OPTIONS)
            wrong, told = wrong_pages(hurt, cold), events("akv.pages.damaged")
            if kind == "off":
                # Nothing is seen, and the page is used.
                assert (hurt.load_failure, hurt.from_pool_tokens, told) == ("", 40, [])
                assert (group, block) in wrong
                continue
            assert (hurt.load_failure, hurt.failed_loads, wrong, len(told)) == ("damaged", 1, [], number + 1)
            assert hurt.tokens == cold.tokens
            assert hurt.logits is not None
            assert cold.logits is not None
            assert hurt.logits.equal(cold.logits)
            # It had been removed, and the request that computed it again has saved it.
            assert pool.probe([key])[0].state is KeyState.OK
            async with served(settings, model) as engine:
                again = await engine.generate("again", tokens, **OPTIONS)
            assert (again.load_failure, again.from_pool_tokens) == ("", 40)
            assert (again.tokens, wrong_pages(again, cold)) == (cold.tokens, [])
    failed = [event["reason"] for event in events("akv.load.failed")]
    assert failed == ([] if kind == "off" else ["damaged"] * len(PLACES))


async def test_S11_a_damaged_page_is_removed_at_once_leased_or_not(
    master: str, pool: MooncakePool, memory: Any, model: Model, new_key: Any
) -> None:
    settings = settings_of(master, new_key(), "checksum")
    async with served(settings, model) as engine:
        await engine.generate("cold", TOKENS, **OPTIONS)
    key = overwrite(pool, memory, settings, TOKENS, 2, 4)
    async with served(msgspec.structs.replace(settings, role="consumer"), model) as engine:
        # It saves nothing, so nobody puts the page again; its lookup has leased it.
        assert (await engine.generate("hurt", TOKENS, **OPTIONS)).load_failure == "damaged"
        assert pool.probe([key])[0].state is KeyState.MISSING


async def test_K1_K5_two_tenants_share_nothing_in_lookup_save_or_load(
    master: str, pool: MooncakePool, model: Model, new_key: Any
) -> None:
    settings = settings_of(master, new_key(), "off")
    scopes = {"a": Scope(salt="tenant-a"), "b": Scope(salt="tenant-b"), "nobody's": Scope()}
    space = KeySpace.of_settings(settings, Pages(CONFIG).layout)

    def stored() -> list[str]:
        return [
            name
            for name, scope in scopes.items()
            for keys in [space.keys(0, Hashing(8).chain(scope, TOKENS).hashes(0, 5))]
            if all(answer.state is KeyState.OK for answer in pool.probe(keys))
        ]

    results: dict[str, Result] = {}
    async with served(settings, model) as engine:
        for number, (name, scope) in enumerate(scopes.items()):
            results[name] = await engine.generate(name, TOKENS, scope=scope, **OPTIONS)
            assert (results[name].lookup_outcome, results[name].from_pool_tokens) == ("full_attention_miss", 0)
            await engine.settled()
            # Saved though the pool has equal bytes under another tenant's name.
            assert stored() == list(scopes)[: number + 1]
    async with served(settings, model) as engine:
        for name, scope in scopes.items():
            hit = await engine.generate(name, TOKENS, scope=scope, **OPTIONS)
            assert (hit.local_tokens, hit.from_pool_tokens) == (0, 40)
            assert (hit.tokens, wrong_pages(hit, results[name])) == (results[name].tokens, [])
        other = await engine.generate("other", TOKENS, scope=Scope(salt="tenant-c"), **OPTIONS)
        assert (other.local_tokens, other.from_pool_tokens) == (0, 0)


async def test_K5_an_offer_of_one_tenant_is_no_offer_for_another(master: str, pool: MooncakePool, new_key: Any) -> None:
    pages = Pages(EngineConfig(model=msgspec.structs.replace(TINY_SLIDING, groups=()), tokens_per_block=8, pages=16))
    settings = settings_of(master, new_key(), "off")
    async with open_connector(settings, pages.layout, pages.caches) as kv:
        async with kv.request("a", TOKENS, Scope(salt="a")) as mine:
            part = Scheduled(request=mine, computed_before=0, tokens=41, pages=[range(6)])
            await kv.after_forward(kv.plan_pass([part]))
        assert pool.calls_running == 0
        async with kv.request("again", TOKENS, Scope(salt="a")) as again, kv.request("b", TOKENS, Scope(salt="b")) as other:
            offer = await again.lookup()
            assert offer.tokens == 40
            assert (await other.lookup()).outcome is LookupOutcome.FULL_ATTENTION_MISS
            with pytest.raises(EngineContractError, match="given an offer of request 'again'"):
                other.reserve(offer, 40, [range(6)])
