"""The reference engine by itself: batching changes no bits, pages come back, and reuse equals computing."""

import threading
from typing import Any

import anyio
import anyio.from_thread
import msgspec
import pytest
import torch
from anyio.abc import TaskStatus

from akv.values.scope import Scope
from akv_testing.engine import Engine, EngineClosed, EngineConfig, Model, open_engine

pytestmark = pytest.mark.anyio

Started = TaskStatus[None]

TOKENS = [7 * position % 251 for position in range(90)]


async def test_Q1_reuse_equals_a_cold_run_with_the_same_chunks(config: EngineConfig, model: Model) -> None:
    async with open_engine(config, model=model) as engine:
        cold = await engine.generate("cold", TOKENS, max_new_tokens=6, local_reuse=False, keep_logits=True, keep_pages=True)
        first = await engine.generate("first", TOKENS[:65], max_new_tokens=1)  # leaves 64 tokens: two whole chunks
        again = await engine.generate("again", TOKENS, max_new_tokens=6, keep_logits=True, keep_pages=True)
    assert (cold.local_tokens, first.local_tokens, again.local_tokens) == (0, 0, 64)
    assert again.tokens == cold.tokens
    assert again.logits is not None
    assert cold.logits is not None
    assert torch.equal(again.logits, cold.logits)
    assert again.page_digests == cold.page_digests
    assert len(again.page_digests[0]) == (90 + 6 - 1) // 8  # the last sampled token has no KV


async def test_continuous_batching_changes_no_bits_and_needs_few_pages(fine: EngineConfig, model: Model) -> None:
    # Two requests at a time. Who grows may have the other preempted, which resumes behind some block of its own: so the chunks
    # are of one block.
    few = msgspec.structs.replace(fine, pages=30)
    prompts = {f"r{i}": [(i + 3) * position % 250 for position in range(60 + 3 * i)] for i in range(12)}
    alone = {}
    async with open_engine(fine, model=model) as engine:
        for name, prompt in prompts.items():
            alone[name] = await engine.generate(
                name, prompt, max_new_tokens=8, local_reuse=False, keep_logits=True, keep_pages=True
            )
    together = {}

    async def one(name: str) -> None:
        together[name] = await engine.generate(name, prompts[name], max_new_tokens=8, keep_logits=True, keep_pages=True)

    async with open_engine(few, model=model) as engine:
        async with anyio.create_task_group() as group:
            for name in prompts:
                group.start_soon(one, name)
        await engine.settled()
        assert engine.cache.check() == []
        assert engine.cache.available_blocks == 30
    for name in prompts:
        assert together[name].tokens == alone[name].tokens
        assert together[name].page_digests == alone[name].page_digests
        logits, expected = together[name].logits, alone[name].logits
        assert logits is not None
        assert expected is not None
        assert torch.equal(logits, expected)


async def test_H1_scopes_share_nothing(config: EngineConfig, model: Model) -> None:
    async with open_engine(config, model=model) as engine:
        await engine.generate("a", TOKENS, max_new_tokens=1, scope=Scope(salt="a"))
        other = await engine.generate("b", TOKENS, max_new_tokens=1, scope=Scope(salt="b"))
        same = await engine.generate("c", TOKENS, max_new_tokens=1, scope=Scope(salt="a"))
    assert (other.local_tokens, same.local_tokens) == (0, 88)


async def test_S12_an_answer_is_the_next_turns_prefix(config: EngineConfig, model: Model) -> None:
    async with open_engine(config, model=model) as engine:
        first = await engine.generate("first", TOKENS, max_new_tokens=10)
        prompt = [*TOKENS, *first.tokens, 250, 249]
        second = await engine.generate("second", prompt, max_new_tokens=1)
    assert second.local_tokens == 96  # 99 tokens of the first turn have KV: twelve whole blocks


@pytest.mark.parametrize("give_up_after_s", [0.0, 0.001, 0.004, 0.01])
async def test_D6_a_client_that_leaves_costs_nobody_a_page(config: EngineConfig, model: Model, give_up_after_s: float) -> None:
    async with open_engine(config, model=model) as engine:

        async def gone(name: str) -> None:
            with anyio.move_on_after(give_up_after_s):
                await engine.generate(name, TOKENS, max_new_tokens=200)

        async with anyio.create_task_group() as group:
            for i in range(4):  # 37 pages each in the end: they take turns
                group.start_soon(gone, f"gone {i}")
            stays = await engine.generate("stays", TOKENS, max_new_tokens=3)
        await engine.settled()
        assert len(stays.tokens) == 3
        assert engine.cache.check() == []
        assert engine.cache.available_blocks == 64


async def test_D6_pages_that_a_pass_writes_are_not_given_back_before_it_ended(
    config: EngineConfig, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, client, reached = threading.Event(), anyio.CancelScope(), anyio.Event()

    async def leaves(engine: Engine) -> None:
        with client:
            await engine.generate("leaves", TOKENS, max_new_tokens=1)

    async with open_engine(config, model=model) as engine, anyio.create_task_group() as group:
        forward = model.forward

        def slow(*arguments: Any) -> torch.Tensor:
            anyio.from_thread.run_sync(reached.set)
            assert goes_on.wait(timeout=60)
            return forward(*arguments)

        monkeypatch.setattr(model, "forward", slow)
        group.start_soon(leaves, engine)
        await reached.wait()
        client.cancel()
        with anyio.move_on_after(0.02):
            await engine.settled()
        assert engine.cache.available_blocks == 64 - 12
        goes_on.set()
        await engine.settled()
        assert engine.cache.available_blocks == 64


async def test_a_request_in_the_queue_that_leaves_lets_the_next_one_in(config: EngineConfig, model: Model) -> None:
    complete: list[str] = []
    client = anyio.CancelScope()

    async def request(
        engine: Engine, name: str, tokens: list[int], max_new_tokens: int, scope: anyio.CancelScope, *, task_status: Started
    ) -> None:
        with scope:
            task_status.started()  # from here to the queue nothing waits, so it stands there when start() returns
            await engine.generate(name, tokens, max_new_tokens=max_new_tokens)
            complete.append(name)

    async with open_engine(config, model=model) as engine, anyio.create_task_group() as group:
        await group.start(request, engine, "long", TOKENS, 200, anyio.CancelScope())
        await group.start(request, engine, "needs every page", [1] * (64 * 8 - 1), 1, client)
        await group.start(request, engine, "small", [1, 2, 3], 1, anyio.CancelScope())
        assert engine.cache.available_blocks >= 64 - 37  # there are pages, but nobody overtakes
        client.cancel()
    assert complete == ["small", "long"]


async def test_what_can_never_be_served_is_refused_at_once(config: EngineConfig, model: Model) -> None:
    async with open_engine(config, model=model) as engine:
        for why, tokens, max_new_tokens in [
            ("needs 513 tokens", [1] * 500, 13),
            ("no tokens", [], 1),
            ("no tokens", [1], 0),
            ("vocabulary", [1, 260], 1),
        ]:
            with pytest.raises(ValueError, match=why):
                await engine.generate("hopeless", tokens, max_new_tokens=max_new_tokens)

        async def first(*, task_status: Started) -> None:
            task_status.started()
            await engine.generate("twice", TOKENS, max_new_tokens=30)

        async with anyio.create_task_group() as group:
            await group.start(first)
            with pytest.raises(ValueError, match="in the engine already"):
                await engine.generate("twice", TOKENS, max_new_tokens=1)
        assert engine.cache.check() == []


async def test_M8_an_engine_that_ends_leaves_no_caller_waiting(config: EngineConfig, model: Model) -> None:
    outcomes: list[str] = []

    async def client(name: str) -> None:
        try:
            await engine.generate(name, TOKENS, max_new_tokens=200)
        except EngineClosed:
            outcomes.append(name)

    async with anyio.create_task_group() as group, open_engine(config, model=model) as engine:
        for name in ("computing", "queued", "queued too"):
            group.start_soon(client, name)
        await anyio.sleep(0.01)
    assert sorted(outcomes) == ["computing", "queued", "queued too"]
    assert engine.cache.check() == []
    assert engine.cache.available_blocks == 64
    with pytest.raises(EngineClosed, match="too late"):
        await engine.generate("late", TOKENS, max_new_tokens=1)


async def test_M8_a_pass_that_fails_ends_the_engine_with_its_error(
    config: EngineConfig, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("the kernel failed")

    monkeypatch.setattr(model, "forward", broken)
    ended: list[type[BaseException]] = []

    engines: list[Engine] = []

    async def client() -> None:
        try:
            await engines[0].generate("r", TOKENS, max_new_tokens=1)
        except EngineClosed as error:
            ended.append(type(error))

    async def serve() -> None:
        async with open_engine(config, model=model) as engine:
            engines.append(engine)
            group.start_soon(client)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        with pytest.raises(ArithmeticError, match="the kernel failed"):
            await serve()
    assert ended == [EngineClosed]
    assert engines[0].cache.check() == []
    assert engines[0].cache.available_blocks == 64


async def test_a_request_resumes_no_later_than_it_is_told_to(config: EngineConfig, model: Model) -> None:
    async with open_engine(config, model=model) as engine:
        cold = await engine.generate("cold", TOKENS, max_new_tokens=3, keep_logits=True)
        for at_most in (0, 8, 32, 39, 88, 1000):
            again = await engine.generate(
                f"at most {at_most}", TOKENS, max_new_tokens=3, local_at_most=at_most, keep_logits=True
            )
            assert again.local_tokens == min(at_most // 8 * 8, 88)
            assert again.tokens == cold.tokens
            if at_most in (0, 32):  # where a chunk of the cold run ends
                assert again.logits is not None
                assert cold.logits is not None
                assert torch.equal(again.logits, cold.logits)
        await engine.settled()
        assert engine.cache.check() == []
