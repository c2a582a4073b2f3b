"""Requests at random, some of them preempted, cancelled, deferred, cut short or failed, wherever they stand (D6, Q1)."""

from collections.abc import Callable
from random import Random

import pytest

from akv.ports.pool import KeyState
from akv_testing.engines.tensorrt_llm import GroupShape, StandInRequest, StandInServer, State

Serve = Callable[..., StandInServer]
#: Prompts begin with one of so many texts.
TEXTS = 4
#: Requests of a run, and the most that are under way at a time.
REQUESTS, AT_A_TIME = 24, 6


def new_request(random: Random, number: int) -> StandInRequest:
    text = random.randrange(TEXTS)
    shared, own = random.choice((0, 31, 64, 97, 160, 200)), random.randrange(1, 90)
    tokens = [text * 1000 + position for position in range(shared)]
    tokens += [random.randrange(50_000) for _ in range(own)]
    return StandInRequest(
        number,
        tokens,
        max_new_tokens=random.choice((1, 2, 40)),
        cache_salt=random.choice((None, None, "a")),
        local_blocks=random.choice((0, 0, 0, 1)) if len(tokens) > 32 else 0,
        is_dummy_request=random.random() < 0.03,
    )


def disturb(random: Random, server: StandInServer) -> None:
    """Something happens to one of those under way."""
    engine = server.engine
    request = random.choice(engine.requests)
    match random.randrange(14):
        case 0:
            engine.cancel(request)
        case 1 if request.state in {State.CONTEXT, State.GENERATION}:
            engine.preempt(request)
        case 2 if not server.session.reserves:
            server.pool.answer("get", random.choice((KeyState.MISSING, KeyState.LEASE_EXPIRED)), skip=random.randrange(2))
        case 3:
            # Enough to refuse it: what is tried again takes its time.
            server.pool.answer("put", KeyState.REFUSED)
        case _:
            pass


@pytest.mark.parametrize("reserves", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_byte_is_wrong_and_nothing_is_left_behind(serve: Serve, seed: int, reserves: bool) -> None:
    random = Random(seed)
    groups = (GroupShape(), GroupShape(70, 4)) if reserves else (GroupShape(), GroupShape())
    for _ in range(2):
        server = serve(groups=groups, reserves=reserves, pages=160, chunk=random.choice((40, 64, 128)))
        if not reserves:
            server.engine.honours = lambda request, tokens: random.choice((tokens, tokens, tokens // 64 * 32))
        server.engine.defers = lambda request: random.random() < 0.1
        number = 0
        while number < REQUESTS:
            under_way = [one for one in server.engine.requests if one.state is not State.DONE]
            if len(under_way) < AT_A_TIME:
                server.engine.submit(new_request(random, number))
                number += 1
            server.engine.run_pass(veto=random.random() < 0.1)
            disturb(random, server)
        server.engine.defers = lambda request: False
        server.engine.run_until_done()
        reused = sum(kept for _, _, kept in server.engine.answers)
        assert server.left_behind() == []
    assert reused > 0
