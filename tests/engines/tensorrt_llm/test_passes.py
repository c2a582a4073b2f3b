"""akv behind TensorRT-LLM's hooks: a request's whole way, in the order of calls of the executor."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from akv.engines.tensorrt_llm.serving import part_of
from akv.ports.calls import CallKind
from akv.values.messages import PassPlan
from akv.values.offers import LookupOutcome, Offer
from akv.values.requests import Scheduled
from akv_testing import FakeStore
from akv_testing.engines.tensorrt_llm import TOKENS_PER_BLOCK as T
from akv_testing.engines.tensorrt_llm import GroupShape, StandInEngine, StandInRequest, StandInServer, State, llm_args

Serve = Callable[..., StandInServer]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + number for number in range(tokens)]


def warm(serve: Serve, *prompts: list[int], **arguments: Any) -> None:
    """Another server has computed these."""
    server = serve(**arguments)
    server.engine.serve(*(StandInRequest(number, tokens) for number, tokens in enumerate(prompts, 1)))
    assert server.left_behind() == []


@pytest.mark.parametrize("groups", [(GroupShape(),), (GroupShape(), GroupShape())])
def test_D1_what_one_server_computed_another_loads_while_its_request_is_parked(
    serve: Serve, groups: tuple[GroupShape, ...]
) -> None:
    first = serve(groups=groups)
    first.engine.serve(StandInRequest(1, prompt(200), max_new_tokens=3))
    assert first.engine.answers == [(1, 0, 0)]
    assert first.left_behind() == []
    second = serve(groups=groups)
    request, other = StandInRequest(1, prompt(200), max_new_tokens=3), StandInRequest(2, prompt(70, seed=1))
    get = second.on_loop(second.runner.hold, CallKind.GET)
    second.engine.submit(request, other)
    second.engine.run_until(lambda: other.state is State.DONE)
    assert request.state is State.PARKED
    second.on_loop(get.release)
    second.engine.run_until_done()
    assert second.engine.answers == [(1, 192, 192), (2, 0, 0)]
    assert second.engine.computed_tokens == {1: 8 + 2, 2: 70}
    assert second.left_behind() == []


def test_L1_a_prompt_of_whole_blocks_keeps_one_to_compute(serve: Serve) -> None:
    warm(serve, prompt(130))
    server = serve()
    server.engine.serve(StandInRequest(1, prompt(96)))
    assert server.engine.answers == [(1, 64, 64)]
    assert server.engine.computed_tokens == {1: 32}
    assert server.left_behind() == []


def test_L1_an_offer_begins_at_the_engines_own_match(serve: Serve) -> None:
    warm(serve, prompt(200))
    server = serve()
    server.engine.serve(StandInRequest(1, prompt(200), local_blocks=2), StandInRequest(2, prompt(200), local_blocks=6))
    assert server.engine.answers == [(1, 128, 128), (2, 0, 0)]
    assert server.left_behind() == []


def test_S12_what_decoding_completes_is_there_for_the_next_turn(serve: Serve) -> None:
    first = serve()
    request = StandInRequest(1, prompt(60), max_new_tokens=40)
    first.engine.serve(request)
    assert first.left_behind() == []
    second = serve()
    second.engine.serve(StandInRequest(1, [*request.get_tokens(0), 7, 8]))
    # 99 tokens have KV: the last one was sampled and never fed back.
    assert second.engine.answers == [(1, 96, 96)]
    assert second.left_behind() == []


def test_S1_drafts_are_told_apart_from_what_is_computed(serve: Serve) -> None:
    config = SimpleNamespace(decoding_type="Eagle3", max_draft_len=3)
    server = serve(args=llm_args(speculative_config=config), lookahead=1, drafts=3)
    parts: list[tuple[int, int, int]] = []
    plan = server.session.serving.kv.plan_pass

    def planned(scheduled: list[Scheduled]) -> PassPlan:
        parts.extend((one.computed_before, one.tokens, one.draft_tokens) for one in scheduled)
        return plan(scheduled)

    server.session.serving.kv.plan_pass = planned  # type: ignore[method-assign,assignment]
    server.engine.serve(StandInRequest(1, prompt(70), max_new_tokens=3))
    assert parts == [(0, 64, 0), (64, 6, 0), (70, 1, 3), (71, 1, 3)]
    assert server.left_behind() == []


def test_pages_that_only_a_pass_tells_are_saved(serve: Serve, store: FakeStore) -> None:
    class TellsLate(StandInEngine):
        """Without an answer to take up it says nothing of an allocation."""

        def _give_pages(self, request: StandInRequest, honoured: int) -> None:
            scheduler, self.scheduler = self.scheduler, SimpleNamespace(update_state_after_alloc=lambda *_: None)
            super()._give_pages(request, honoured)
            self.scheduler = scheduler

    server = serve(engine=TellsLate)
    server.engine.serve(StandInRequest(1, prompt(200)))
    assert len(store.keys()) == 6
    assert server.left_behind() == []


@pytest.mark.parametrize("honoured", [0, 32, 128])
def test_L6_a_part_of_an_offer_is_loaded_and_the_rest_computed(serve: Serve, honoured: int) -> None:
    warm(serve, prompt(200))
    server = serve()
    server.engine.honours = lambda request, tokens: honoured
    server.engine.serve(StandInRequest(1, prompt(200)))
    assert server.engine.answers == [(1, 192, 192)]
    assert server.engine.computed_tokens == {1: 200 - honoured}
    assert server.pool.bytes_moved["get"] == honoured // T * server.cache.page_bytes
    assert server.left_behind() == []


def test_D9_an_offer_that_is_taken_up_with_nothing_ends_at_once(serve: Serve) -> None:
    """The runtime parks such a request all the same, and waits to be told."""
    warm(serve, prompt(200))
    server = serve()
    scheduler, request = server.engine.scheduler, StandInRequest(1, prompt(200))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (192, True)
    request.py_num_connector_matched_tokens = 0
    scheduler.update_state_after_alloc(request, [0, 1, 2, 3, 4, 5, 6])
    assert server.until(lambda: server.engine.worker.get_finished([], [1])[1]) == [1]
    assert server.pool.bytes_moved["get"] == 0
    assert scheduler.request_finished(request, []) is False


def test_H3_a_request_that_was_asked_early_and_deferred_keeps_its_answer(serve: Serve) -> None:
    warm(serve, prompt(200), prompt(150, seed=1))
    server = serve(asks_early=True)
    waited: list[int] = []

    def defers(request: StandInRequest) -> bool:
        waited.append(request.request_id)
        return request.request_id == 1 and waited.count(1) < 4

    server.engine.defers = defers
    server.engine.serve(StandInRequest(1, prompt(200)), StandInRequest(2, prompt(150, seed=1)))
    assert sorted(server.engine.answers) == [(1, 192, 192), (2, 128, 128)]
    assert server.left_behind() == []


@pytest.mark.parametrize(
    ("given_up", "left"),
    [
        ((128, 192), (0, 128)),
        ((0, 64), (64, 192)),
        ((0, 192), (0, 0)),
        ((192, 256), (0, 192)),
        ((64, 96), (0, 64)),
        ((0, 40), (0, 0)),
    ],
)
def test_cancel_load_gives_up_exactly_that_part_of_an_offer(
    serve: Serve, given_up: tuple[int, int], left: tuple[int, int]
) -> None:
    warm(serve, prompt(200))
    server = serve()
    scheduler, request = server.engine.scheduler, StandInRequest(1, prompt(200))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (192, True)
    scheduler.cancel_load(request, *given_up)
    pages = [server.cache.take(0) for _ in range(7)]
    request.py_num_connector_matched_tokens = left[1] - left[0]
    scheduler.update_state_after_alloc(request, pages)
    if left[1]:
        server.until(lambda: server.engine.worker.get_finished([], [1])[1])
    whole = [server.engine._right(request, block, 0) for block in range(6)]
    held = [server.cache.read(0, page) for page in pages]
    assert [block for block in range(6) if held[block] == whole[block]] == list(range(left[0] // T, left[1] // T))


def test_what_is_unknown_is_ignored(serve: Serve) -> None:
    server = serve()
    stranger = StandInRequest(99, prompt(40))
    server.engine.scheduler.cancel_load(stranger, 0, 32)
    server.engine.scheduler.request_reset(stranger)
    assert server.engine.scheduler.request_finished(stranger, [3]) is False
    server.engine.worker.drop_bound_saves({98})
    assert server.engine.worker.get_finished([], []) == ([], [])
    request = StandInRequest(1, prompt(70))
    server.engine.submit(request)
    server.engine.run_pass()
    server.engine.scheduler.cancel_load(request, 0, 32)  # late: there is nothing to give up
    server.engine.run_until_done()
    assert server.left_behind() == []


def test_an_id_may_come_again_while_its_first_request_is_saved(serve: Serve, store: FakeStore) -> None:
    server = serve()
    put = server.on_loop(server.runner.hold, CallKind.PUT)
    first = StandInRequest(1, prompt(70))
    server.engine.submit(first)
    server.engine.run_until(lambda: first.state is State.SAVING)
    again = StandInRequest(1, prompt(100, seed=1))
    assert server.engine.scheduler.get_num_new_matched_tokens(again, 0) == (0, False)
    server.engine.scheduler.request_finished(again, [])
    server.on_loop(put.release)
    server.engine.run_until_done()
    assert len(store.keys()) == 2
    assert server.left_behind() == []


def test_only_announced_ids_are_named(serve: Serve) -> None:
    server = serve()
    put = server.on_loop(server.runner.hold, CallKind.PUT)
    request = StandInRequest(1, prompt(70))
    server.engine.submit(request)
    server.engine.run_until(lambda: request.state is State.SAVING)
    server.on_loop(put.release)
    server.until(lambda: server.engine.worker.get_finished([], []) == ([], []) and len(server.store.keys()) == 2)
    server.engine.run_until_done()
    assert server.engine.worker.get_finished([], []) == ([], [])
    assert server.left_behind() == []


def test_a_load_that_was_not_announced_is_not_named(serve: Serve) -> None:
    warm(serve, prompt(200))
    server = serve()
    scheduler, worker, request = server.engine.scheduler, server.engine.worker, StandInRequest(1, prompt(200))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (192, True)
    request.py_num_connector_matched_tokens = 192
    scheduler.update_state_after_alloc(request, [0, 1, 2, 3, 4, 5, 6])
    server.until(lambda: server.session.ends._loads)
    assert worker.get_finished([], []) == ([], [])
    assert worker.get_finished([], [1]) == ([], [1])


@pytest.mark.parametrize(
    ("begin", "upto", "tokens", "ends"),
    [(64, 192, 128, (32, 96, 128)), (96, 192, 96, (64, 96)), (64, 191, 96, (32, 96)), (160, 190, 0, ()), (70, 192, 0, ())],
)
def test_W8_a_part_of_an_offer_has_the_ends_that_lie_in_it(begin: int, upto: int, tokens: int, ends: tuple[int, ...]) -> None:
    offer = Offer(
        request_id="1",
        incarnation=1,
        local_tokens=64,
        tokens=128,
        outcome=LookupOutcome.FULL,
        tokens_per_block=32,
        ends=(32, 96, 128),
    )
    part = part_of(offer, begin, upto)
    assert (part.tokens, part.ends) == (tokens, ends)
    assert part.local_tokens == (64 if begin == 70 else begin)


def test_an_end_counts_once_every_rank_has_told_it(serve: Serve) -> None:
    warm(serve, prompt(200))
    server = serve()
    request, other = StandInRequest(1, prompt(200)), StandInRequest(2, prompt(70, seed=1), max_new_tokens=20)
    server.engine.transfers.withheld.add(1)
    server.engine.submit(request, other)
    server.engine.run_until(lambda: other.state is State.DONE)
    assert request.state is State.PARKED
    server.engine.transfers.withheld.clear()
    server.engine.run_until_done()
    assert server.left_behind() == []


def test_L7_a_dummy_is_nothing_to_akv_and_logits_read_nothing(serve: Serve, store: FakeStore) -> None:
    warm(serve, prompt(200))
    there = store.keys()
    server = serve()
    dummy = StandInRequest(1, prompt(200), is_dummy_request=True)
    logits = StandInRequest(2, prompt(200), py_return_context_logits=True)
    server.engine.serve(dummy, logits)
    assert server.engine.answers == [(1, 0, 0), (2, 0, 0)]
    assert sorted(store.keys()) == sorted(there)
    generation = StandInRequest(3, prompt(200), is_generation_only_request=True)
    assert server.engine.scheduler.get_num_new_matched_tokens(generation, 0) == (0, False)
    assert server.left_behind() == []


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_O1_a_role_does_its_half(serve: Serve, store: FakeStore, role: str) -> None:
    warm(serve, prompt(200))
    before = len(store.keys())
    server = serve(settings={"role": role})
    server.engine.serve(StandInRequest(1, prompt(200)), StandInRequest(2, prompt(100, seed=1)))
    assert server.engine.answers[0] == ((1, 192, 192) if role == "consumer" else (1, 0, 0))
    assert len(store.keys()) - before == (3 if role == "producer" else 0)
    assert server.left_behind() == []


def test_a_request_that_nobody_asked_for_is_saved_all_the_same(serve: Serve, store: FakeStore) -> None:
    """The runtime asks nothing where block reuse is off."""

    class NoReuse(StandInEngine):
        def _ask(self, request: StandInRequest) -> None:
            request.was_asked = True

    server = serve(engine=NoReuse)
    server.engine.serve(StandInRequest(1, prompt(100)))
    assert len(store.keys()) == 3
    assert server.left_behind() == []
