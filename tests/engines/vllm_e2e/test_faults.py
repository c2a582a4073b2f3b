"""A real vLLM whose pool fails: every request is answered as if there were none, and soon."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from statistics import median

import pytest

from akv_testing.master import running_master
from akv_testing.processes import halt
from akv_testing.vllm.client import Server
from akv_testing.vllm.models import LLAMA
from akv_testing.vllm.protocol import AKV, FailGets, Generate, Options, Report, Reset, Settle

#: The first test imports vLLM, which may compile thousands of files: more than other tests are given.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

REUSED = 1920
#: Requests on either side of a comparison.
SAMPLES = 9
#: Seconds by which requests may be slower with the master gone.
MOST_SLOWER_S = 0.1
#: Seconds from a load's dispatch after which its request computes.
LOAD_DEADLINE_S = 2.0
#: A server of two tensor-parallel ranks.
TWO_RANKS = Options(model="", connector=AKV, blocks=256, ahead=True, ranks=2)


@pytest.fixture(scope="module")
def own_master() -> Iterator[tuple[str, int]]:
    """A master that a test may kill: its address and its process id."""
    with running_master() as started:
        yield started


@pytest.fixture(scope="module")
def own_pool() -> Iterator[str]:
    """A pool in which nobody was killed: puts to a dead holder's memory are refused for some seconds."""
    with running_master() as (address, _):
        yield address


@pytest.fixture(scope="module")
def server(own_master: tuple[str, int], open_server: Callable[..., Server]) -> Server:
    """A server that lends no memory itself: its pages are with whoever does."""
    address, _ = own_master
    return open_server(LLAMA, address, segment_bytes=0, load_deadline_s=LOAD_DEADLINE_S)


def ask(server: Server, prompt: list[int]) -> Report:
    report = server.ask(Generate(prompts=[prompt], tokens=8))
    server.ask(Settle())
    return report


def stored(server: Server, prompt: list[int]) -> Report:
    """Compute a prompt, have it saved, and forget it locally."""
    report = ask(server, prompt)
    assert server.ask(Reset()).done
    return report


def test_D2_a_request_whose_gets_all_fail_is_computed_and_asked_for_no_more(
    server: Server,
    own_master: tuple[str, int],
    lender: Callable[[str], "subprocess.Popen[bytes]"],
    prompt: Callable[..., list[int]],
) -> None:
    lender(own_master[0])
    asked, other = prompt("asked"), prompt("other")
    cold = stored(server, asked)
    stored(server, other)
    server.ask(FailGets(fail=True))
    report = ask(server, asked)
    (answer,) = report.answers
    assert report.failed_gets > 0
    assert answer.cached_tokens == 0
    assert answer.tokens == cold.answers[0].tokens
    # As many passes as the cold request had, but for the one that found out.
    assert report.passes <= cold.passes + 1
    assert ask(server, prompt("third")).failed_gets == report.failed_gets
    server.ask(FailGets(fail=False))
    assert ask(server, other).answers[0].external_tokens == REUSED


def test_D3_S12_what_is_computed_after_loads_that_failed_is_saved_all_the_same(
    open_server: Callable[..., Server], prompt: Callable[..., list[int]], own_pool: str
) -> None:
    # Its gets go through the client, where they can be made to fail, though the pages are its own.
    server = open_server(LLAMA, own_pool, load_deadline_s=LOAD_DEADLINE_S, read_path="staged")
    root = prompt("root")[:961]
    # Both are offered the same pages. What the first one computes is a local match of the second one's then.
    asked = [root, [*root[:960], *prompt("rest")[:200]]]
    for one in asked:
        stored(server, one)
    server.ask(FailGets(fail=True))
    report = server.ask(Generate(prompts=asked, tokens=40))
    server.ask(Settle())
    assert report.counted["failed_loads"] >= 1
    # Else everything behind the failed load goes without being saved.
    assert "akv.engine.pass_unsaved" not in server.logged()


def test_D3_a_load_that_fails_on_one_rank_is_computed_on_all_of_them(
    open_server: Callable[..., Server], prompt: Callable[..., list[int]], own_pool: str
) -> None:
    # As above, with two ranks of which one gets its pages.
    server = open_server(LLAMA, own_pool, like=TWO_RANKS, load_deadline_s=LOAD_DEADLINE_S, read_path="staged")
    cold = stored(server, prompt())
    server.ask(FailGets(fail=True, rank=1))
    report = ask(server, prompt())
    (answer,) = report.answers
    assert report.failed_gets > 0
    assert report.counted["failed_loads"] == 1
    assert answer.cached_tokens == 0
    assert answer.tokens == cold.answers[0].tokens
    assert report.passes <= cold.passes + 1
    server.ask(FailGets(fail=False))
    # What was computed meanwhile is a local hit on both, and another prompt's load ends well on both.
    assert ask(server, prompt()).answers[0].local_tokens == REUSED
    stored(server, prompt("other"))
    assert ask(server, prompt("other")).answers[0].external_tokens == REUSED
    assert "akv.engine.pass_unsaved" not in server.logged()


def test_D3_a_request_whose_pages_died_with_their_holder_is_computed(
    server: Server,
    own_master: tuple[str, int],
    lender: Callable[[str], "subprocess.Popen[bytes]"],
    prompt: Callable[..., list[int]],
) -> None:
    holder = lender(own_master[0])
    cold = stored(server, prompt())
    halt(holder.pid, signal.SIGKILL)
    report = ask(server, prompt())
    (answer,) = report.answers
    # They were offered, since the master goes on naming what a dead process held; and were not there.
    assert report.counted["failed_loads"] >= 1
    assert answer.cached_tokens == 0
    assert answer.tokens == cold.answers[0].tokens
    assert report.seconds < cold.seconds + LOAD_DEADLINE_S + 1.0
    # Once more, with nothing that waits.
    assert ask(server, prompt()).answers[0].local_tokens == REUSED


def test_K8_after_a_reset_of_the_connector_a_server_finds_its_own_pages_alone(
    master: str, open_server: Callable[..., Server], prompt: Callable[..., list[int]]
) -> None:
    # In a pool in which nobody was killed: puts to a dead holder's memory are refused for some seconds.
    server = open_server(LLAMA, master, load_deadline_s=LOAD_DEADLINE_S)
    cold = stored(server, prompt())
    asleep = open_server(LLAMA, master, load_deadline_s=LOAD_DEADLINE_S)
    assert stored(asleep, prompt()).answers[0].external_tokens == REUSED
    # Before it sleeps, or gets new weights, vLLM asks for that, and goes on only if it was done.
    assert asleep.ask(Reset(connector=True)).done
    assert stored(asleep, prompt()).answers[0].cached_tokens == 0
    (answer,) = ask(asleep, prompt()).answers
    assert answer.external_tokens == REUSED
    assert answer.tokens == cold.answers[0].tokens
    assert stored(server, prompt()).answers[0].cached_tokens == REUSED


def test_L2_requests_are_as_fast_once_the_master_is_gone(
    server: Server,
    own_master: tuple[str, int],
    lender: Callable[[str], "subprocess.Popen[bytes]"],
    prompt: Callable[..., list[int]],
) -> None:
    lender(own_master[0])
    before = [ask(server, prompt(f"before {number}")).seconds for number in range(SAMPLES)]
    halt(own_master[1], signal.SIGKILL)
    ask(server, prompt("first to meet it"))
    after = [ask(server, prompt(f"after {number}")) for number in range(SAMPLES)]
    assert all(report.answers[0].finish_reason == "length" for report in after)
    assert median(report.seconds for report in after) < median(before) + MOST_SLOWER_S
