"""vLLM as its users run it: its core in a process of its own, which steps itself, and clients that stream and leave."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from random import Random

import pytest

from akv_testing.master import running_master
from akv_testing.vllm.client import Server
from akv_testing.vllm.protocol import AKV, NO_CONNECTOR, Answer, Generate, Leave, Options, Reset, Settle

#: The first test imports vLLM, which may compile thousands of files: more than other tests are given.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

REUSED = 1920
#: Holds some of the prompts of a test, and never all.
SMALL_POOL_BYTES = 16 * 1024**2


def apart(blocks: int, pass_tokens: int = 2048) -> Options:
    return Options(model="", connector=AKV, blocks=blocks, ahead=True, apart=True, pass_tokens=pass_tokens)


@pytest.fixture(scope="session")
def served(model: str, master: str, open_server: Callable[..., Server]) -> Server:
    return open_server(model, master, like=apart(256), lookup_deadline_s=20.0, load_deadline_s=30.0)


@pytest.fixture(scope="session")
def small(model: str, few_blocks: int, master: str, open_server: Callable[..., Server]) -> Server:
    """A second one, with few blocks."""
    return open_server(model, master, like=apart(few_blocks), lookup_deadline_s=20.0, load_deadline_s=30.0)


def ask(server: Server, *prompts: list[int], tokens: int = 8) -> list[Answer]:
    report = server.ask(Generate(prompts=list(prompts), tokens=tokens))
    # Nobody steps the core for us: what it waits for has to wake it.
    server.ask(Settle())
    return report.answers


def forget(server: Server) -> None:
    # Fails while any block is in use.
    assert server.ask(Reset()).done


def outcome(answer: Answer) -> tuple[list[int], list[float]]:
    return answer.tokens, answer.logprobs


def test_D1_a_server_finds_what_it_and_another_one_computed(
    served: Server, small: Server, prompt: Callable[..., list[int]]
) -> None:
    asked = prompt()
    (cold,) = ask(served, asked)
    (local,) = ask(served, asked)
    forget(served)
    (loaded,) = ask(served, asked)
    (elsewhere,) = ask(small, asked)
    forget(small)
    found = [(one.local_tokens, one.external_tokens) for one in (cold, local, loaded, elsewhere)]
    assert found == [(0, 0), (REUSED, 0), (0, REUSED), (0, REUSED)]
    assert outcome(loaded) == outcome(elsewhere) == outcome(local)
    assert cold.tokens == local.tokens


def test_D8_preempted_requests_go_on_and_answer_the_same(
    served: Server, small: Server, prompt: Callable[..., list[int]]
) -> None:
    many = [prompt(str(number), tokens=900) for number in range(5)]
    alone = [ask(served, each, tokens=90)[0].tokens for each in many]
    free = small.ask(Settle()).free_blocks
    for _ in range(2):
        answers = ask(small, *many, tokens=90)
        assert [answer.tokens for answer in answers] == alone
        assert sum(answer.preemptions for answer in answers) > 0
        assert sum(answer.external_tokens for answer in answers) > 0
        forget(small)
        assert small.ask(Settle()).free_blocks == free


@pytest.mark.parametrize("within_s", [0.02, 0.3])
def test_D6_clients_that_leave_at_any_moment_leave_every_block_and_disturb_nobody(
    served: Server, small: Server, prompt: Callable[..., list[int]], within_s: float
) -> None:
    many = [prompt(str(number), tokens=700) for number in range(12)]
    cold = [ask(served, each, tokens=40)[0].tokens for each in many]
    free = small.ask(Settle()).free_blocks
    for _ in range(3):
        # Some leave while they are looked up, some while their pages load, some while they compute.
        small.ask(Leave(prompts=many, tokens=40, within_s=within_s))
        small.ask(Settle())
        forget(small)
        assert small.ask(Settle()).free_blocks == free
    answers = ask(small, *many, tokens=40)
    assert [answer.tokens for answer in answers] == cold
    assert sum(answer.external_tokens for answer in answers) > 0


def test_D3_D6_D8_whatever_happens_every_answer_is_that_of_a_server_without_a_connector(
    model: str, few_blocks: int, serve: Callable[..., AbstractContextManager[Server]], prompt: Callable[..., list[int]]
) -> None:
    random = Random(7)
    root = prompt("root", tokens=1200)
    lengths = [1, 31, 32, 33, 400]
    turns = [[*root[: 32 * random.randrange(38)], *prompt(str(n), tokens=random.choice(lengths))] for n in range(20)]
    with running_master() as (address, _), ExitStack() as stack:
        plain = stack.enter_context(serve(model, address, like=Options(model="", connector=NO_CONNECTOR, blocks=256)))
        expected = [ask(plain, turn, tokens=40)[0].tokens for turn in turns]
        # A pool that evicts all the time; passes of parts of prompts; and requests that are preempted.
        small = apart(few_blocks, pass_tokens=192)
        server = stack.enter_context(serve(model, address, segment_bytes=SMALL_POOL_BYTES, like=small))
        counted = Counter[str]()
        free = server.ask(Settle()).free_blocks
        for _ in range(25):
            asked = [random.randrange(len(turns)) for _ in range(random.choice([1, 3, 9]))]
            prompts, tokens = [turns[one] for one in asked], random.choice([1, 8, 40])
            if random.random() < 0.3:
                server.ask(Leave(prompts=prompts, tokens=tokens, within_s=random.choice([0.01, 0.2])))
            else:
                report = server.ask(Generate(prompts=prompts, tokens=tokens))
                assert [answer.tokens for answer in report.answers] == [expected[one][:tokens] for one in asked]
                counted.update(report.counted)
            if random.random() < 0.7:
                server.ask(Settle())
                forget(server)
        server.ask(Settle())
        forget(server)
        assert server.ask(Settle()).free_blocks == free
        assert counted["loads"] > 0
        # A load that fails is the pool's affair; what cannot be planned, named or taken up is a fault of the adapter's.
        for fault in ("pass_unsaved", "load_refused", "request_excluded", "without_cache"):
            assert f"akv.engine.{fault}" not in server.logged()
