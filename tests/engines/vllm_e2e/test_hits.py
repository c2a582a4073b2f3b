"""Where a real vLLM gets a prompt's KV from, and that its answers do not depend on it.

"Equal" means the same tokens with the same log probabilities, bit for bit, wherever the passes have the same shape: a request
that resumes at a token answers the same whether the pages in front of it were its own server's or the pool's.
"""

from collections.abc import Callable

import pytest

from akv_testing.vllm.client import Server
from akv_testing.vllm.models import LLAMA
from akv_testing.vllm.protocol import AKV, Abort, Answer, Generate, Options, Report, Reset, Settle

#: The first test imports vLLM, which may compile thousands of files: more than other tests are given.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PROMPT_TOKENS = 1921
#: What of a prompt can be reused: whole blocks, and its last token is always computed.
REUSED = 1920
#: Beside other work a lookup may take longer than a server would wait; what is measured here is not time.
PATIENT = {"lookup_deadline_s": 20.0, "load_deadline_s": 30.0}


def ask(server: Server, *prompts: list[int], tokens: int = 8) -> list[Answer]:
    """Ask prompts at once, and let everything be saved."""
    report = server.ask(Generate(prompts=list(prompts), tokens=tokens))
    settled(server)
    return report.answers


def settled(server: Server) -> Report:
    return server.ask(Settle())


def forget(server: Server) -> None:
    assert server.ask(Reset()).done


def sources(answer: Answer) -> tuple[int, int]:
    """Tokens from the server's own cache, and from the pool."""
    assert answer.cached_tokens == answer.local_tokens + answer.external_tokens
    return answer.local_tokens, answer.external_tokens


def outcome(answer: Answer) -> tuple[list[int], list[float]]:
    assert answer.finish_reason == "length"
    return answer.tokens, answer.logprobs


def assert_close(answer: Answer, other: Answer) -> None:
    """Equal but for what the shapes of passes do to the last bits."""
    assert answer.tokens == other.tokens
    assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_D1_a_hit_from_the_pool_answers_as_a_local_hit_in_this_process_and_in_another(
    first: Server, second: Server, prompt: Callable[..., list[int]]
) -> None:
    asked = prompt()
    (cold,) = ask(first, asked)
    (local,) = ask(first, asked)
    forget(first)
    (loaded,) = ask(first, asked)
    (elsewhere,) = ask(second, asked)
    assert [sources(one) for one in (cold, local, loaded, elsewhere)] == [(0, 0), (REUSED, 0), (0, REUSED), (0, REUSED)]
    assert outcome(loaded) == outcome(local)
    assert outcome(elsewhere) == outcome(local)
    assert_close(cold, local)


def test_D1_what_was_loaded_is_a_local_hit_afterwards(first: Server, prompt: Callable[..., list[int]]) -> None:
    asked = prompt()
    ask(first, asked)
    forget(first)
    (loaded,) = ask(first, asked)
    (again,) = ask(first, asked)
    assert (sources(loaded), sources(again)) == ((0, REUSED), (REUSED, 0))
    assert outcome(again) == outcome(loaded)


def test_K3_a_rank_in_a_process_of_its_own_shares_with_a_server_of_one_process(
    master: str, open_server: Callable[..., Server], prompt: Callable[..., list[int]]
) -> None:
    asked = prompt()
    here = open_server(LLAMA, master, like=Options(model="", connector=AKV, blocks=256, ahead=True), **PATIENT)
    (cold,) = ask(here, asked)
    apart = open_server(LLAMA, master, like=Options(model="", connector=AKV, blocks=256, ahead=True, ranks=1), **PATIENT)
    (loaded,) = ask(apart, asked)
    (local,) = ask(apart, asked)
    assert [sources(one) for one in (loaded, local)] == [(0, REUSED), (REUSED, 0)]
    assert outcome(loaded) == outcome(local)
    assert_close(loaded, cold)


def test_K1_another_prompt_gets_nothing_of_this_one(first: Server, prompt: Callable[..., list[int]]) -> None:
    asked = prompt()
    ask(first, asked)
    forget(first)
    other = [(asked[0] + 1) % 512, *asked[1:]]
    (answer,) = ask(first, other)
    assert sources(answer) == (0, 0)


def test_S1_the_next_turn_finds_what_was_generated(first: Server, second: Server, prompt: Callable[..., list[int]]) -> None:
    asked = prompt(tokens=500)
    (answer,) = ask(first, asked, tokens=60)
    # Of 560 tokens all but the last have KV: 17 blocks. The turn completes no other one.
    turn = [*asked, *answer.tokens, *prompt("next turn", tokens=10)]
    (elsewhere,) = ask(second, turn)
    assert sources(elsewhere) == (0, 544)
    (here,) = ask(first, turn)
    # vLLM itself keeps less of a window than akv stored.
    assert here.local_tokens >= 480
    assert here.cached_tokens == 544
    assert outcome(elsewhere) == outcome(here)


def test_L6_twelve_at_once_all_come_from_the_pool(first: Server, second: Server, prompt: Callable[..., list[int]]) -> None:
    many = [prompt(str(number), tokens=225) for number in range(12)]
    cold = [ask(first, each)[0] for each in many]
    loaded = ask(second, *many)
    assert [sources(one) for one in loaded] == [(0, 224)] * 12
    for answer, other in zip(loaded, cold, strict=True):
        assert_close(answer, other)


def test_L5_only_what_is_missing_locally_is_loaded(
    model: str, first: Server, second: Server, prompt: Callable[..., list[int]]
) -> None:
    asked = prompt()
    ask(first, asked)
    ask(second, asked[:961])
    (answer,) = ask(second, asked)
    assert sources(answer) == (960, 960)
    (local,) = ask(second, asked)
    assert outcome(answer) == outcome(local)
    assert model  # of each


def test_D8_preempted_requests_go_on_and_answer_the_same(
    first: Server, second: Server, prompt: Callable[..., list[int]]
) -> None:
    two = [prompt(str(number), tokens=1900) for number in range(2)]
    alone = [ask(first, each, tokens=80)[0] for each in two]
    forget(second)
    report = second.ask(Generate(prompts=two, tokens=80))
    assert sum(answer.preemptions for answer in report.answers) > 0
    # Both began in pages from the pool; what a preempted one computed it found there once more.
    assert [answer.external_tokens for answer in report.answers] == [1888, 1888]
    for answer, other in zip(report.answers, alone, strict=True):
        assert_close(answer, other)
    assert settled(second).free_blocks == settled_blocks(second)


def settled_blocks(server: Server) -> int:
    forget(server)
    return server.ask(Settle()).free_blocks


def test_D6_a_request_aborted_while_it_loads_leaves_every_block(
    model: str, first: Server, second: Server, prompt: Callable[..., list[int]]
) -> None:
    asked = prompt()
    (cold,) = ask(first, asked)
    free = settled(second).free_blocks
    forget(second)
    for _ in range(3):
        assert second.ask(Abort(prompt=asked)).status == "WAITING_FOR_REMOTE_KVS"
    assert settled(second).free_blocks == free
    (answer,) = ask(second, asked)
    # A load that was over before the abort was seen may have filled the local cache.
    assert answer.cached_tokens == REUSED
    assert_close(answer, cold)
    assert model in (LLAMA, model)
