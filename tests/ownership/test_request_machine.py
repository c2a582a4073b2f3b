"""Whole lives of requests: both halves' ownership, with messages that lag in both directions.

The machine plays an honest engine, `Worker` (in conftest.py) the flows of a worker half. Between them they know what each page
holds, who owns it and which copies run, and so find a page that is given back while something touches it, and bytes that are
published under a wrong hash. A life may be preempted, and goes on with other pages. Covers S1, S2, S7, S12, D2, D6, D8, D9,
M2, M6, M7.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from akv.errors import EngineContractError
from akv.ownership.backlog import SaveBacklog, Shed
from akv.ownership.request_record import LoadHold, RequestRecord
from akv.ownership.requests import Effect, Requests
from akv.plan.backlog import BacklogBounds
from akv.plan.hashing import Chain, scope_seed
from akv.plan.lifecycle import Phase
from akv.values.messages import (
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesUnread,
    SaveOrder,
    SaveResult,
    Withdrawal,
)
from akv.values.scope import EMPTY_SCOPE

if TYPE_CHECKING:
    from tests.ownership.conftest import Worker

T = 2
BLOCKS = 4
GROUPS = 2
PAGES = 3 * BLOCKS
#: Two prompts that share their first half.
PROMPTS = (tuple(range(BLOCKS * T + 1)), (*range(BLOCKS * T // 2), *range(50, 51 + BLOCKS * T // 2)))
Page = tuple[int, int]
Order = LoadOrder | SaveOrder | Withdrawal
Report = LoadResult | SaveResult | PagesUnread


class Life:
    """What the engine knows of one request."""

    def __init__(self, record: RequestRecord, pages: list[int]) -> None:
        self.record = record
        #: One table for both groups; the pages of the second lie in another cache.
        self.table = tuple(pages)
        self.hashes = record.chain.hashes(0, BLOCKS)
        #: Blocks whose pages hold KV; and what they will be once the planned passes ran.
        self.kv = 0
        self.planned = 0
        self.hold: LoadHold | None = None
        self.closed = False
        #: Blocks that its half was told are in the pool, and those handed over for saving and not heard of since.
        self.there: set[int] = set()
        self.on_their_way: set[int] = set()

    def column(self, blocks: range) -> tuple[GroupPages, ...]:
        hashes = tuple(self.hashes[block] for block in blocks)
        pages = tuple(self.table[block] for block in blocks)
        return tuple(GroupPages(group, tuple(blocks), pages, hashes) for group in range(GROUPS)) if blocks else ()


class RequestMachine(RuleBasedStateMachine):
    worker_half: "ClassVar[type[Worker]]"
    #: In pages and passes.
    bounds: ClassVar[BacklogBounds] = BacklogBounds(2**40, 2**40)
    #: Over all runs: requests that came to their end, incarnations that were preempted, hand-overs that were too much.
    closed: ClassVar[int] = 0
    preempted: ClassVar[int] = 0
    shed: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.worker = self.worker_half(GROUPS)
        self.backlog = SaveBacklog([1] * GROUPS, self.bounds)
        self.requests = Requests(groups=GROUPS, backoff_s=1.0, backlog=self.backlog)
        self.to_worker: deque[Order] = deque()
        self.told: list[Report] = []
        self.lives: dict[int, Life] = {}
        self.free_pages = list(range(PAGES))
        #: Plans in the order of their passes: request, blocks computed after it, the listed save, first block of the tail.
        self.plans: list[list[tuple[Life, int, SaveOrder | None, int]]] = []
        #: The model of the connector's hands: pages of active loads, pages of queued saves by save.
        self.lent: dict[int, Iterable[Page]] = {}
        self.pinned: dict[int, tuple[int, Iterable[Page]]] = {}
        #: Hashes that the scheduler half was told are in the pool.
        self.known: set[bytes] = set()
        self.now = 0.0

    # -- the engine

    def open_lives(self) -> list[Life]:
        return [life for life in self.lives.values() if life.record.is_open]

    @initialize(matched=st.tuples(st.integers(0, 2), st.integers(0, 2)))
    def two_requests_arrive(self, matched: tuple[int, int]) -> None:
        for request_id, prompt, blocks in zip("ab", PROMPTS, matched, strict=True):
            self.open(request_id, prompt, blocks)

    @precondition(lambda self: len(self.free_pages) >= BLOCKS)
    @rule(request_id=st.sampled_from("abc"), prompt=st.sampled_from(PROMPTS), matched=st.integers(0, 2))
    def open(self, request_id: str, prompt: tuple[int, ...], matched: int) -> None:
        if any(life.record.request_id == request_id for life in self.lives.values()):
            return
        chain = Chain(scope_seed(EMPTY_SCOPE), T)
        chain.append(prompt)
        record = self.requests.open(request_id, chain, reads_cache=True)
        life = Life(record, [self.free_pages.pop(0) for _ in range(BLOCKS)])
        assert record.incarnation not in self.worker.given_back, "an incarnation is used once"
        self.lives[record.incarnation] = life
        self.compute(life, range(matched))
        life.kv = life.planned = matched

    @precondition(lambda self: self.open_lives())
    @rule(data=st.data(), local=st.integers(0, BLOCKS), count=st.integers(0, BLOCKS))
    def reserve(self, data: st.DataObject, local: int, count: int) -> None:
        life = data.draw(st.sampled_from(self.open_lives()))
        if any(life is planned for parts in self.plans for planned, *_ in parts):
            return  # its pass is under way: an engine does not reload what it computes
        record, local = life.record, min(local, life.kv)
        groups = life.column(range(local, min(BLOCKS, local + count)))
        pages = self.worker.pages_of(groups)
        self.requests.matched_locally(record, local * T)
        busy = any(set(pages) & set(held) for _, held in self.pinned.values())
        if record.load is not None or busy:
            with pytest.raises(EngineContractError):
                self.requests.reserve(record, groups, local * T, len(pages) // GROUPS * T)
            return
        order, life.hold = self.requests.reserve(record, groups, local * T, len(pages) // GROUPS * T)
        life.kv = life.planned = local
        self.lent[order.load_id] = pages
        self.to_worker.append(order)

    @precondition(lambda self: self.open_lives())
    @rule(data=st.data(), blocks=st.integers(0, 2), missing=st.sets(st.integers(0, BLOCKS - 1), max_size=1))
    def plan(self, data: st.DataObject, blocks: int, missing: set[int]) -> None:
        """Plan a pass of one or two requests; plans may be made ahead of the passes."""
        parts: list[tuple[Life, int, SaveOrder | None, int]] = []
        for life in data.draw(st.lists(st.sampled_from(self.open_lives()), min_size=1, max_size=2, unique=True)):
            if life.record.load is not None:
                continue
            assert life.record.valid_to is None or life.kv * T <= life.record.valid_to, "an honest pass would be refused"
            life.planned = min(BLOCKS, life.planned + blocks)
            table = [-1 if block in missing else page for block, page in enumerate(life.table)]
            order = self.requests.listing.blocks(life.record, life.planned, [table] * GROUPS, 0, self.now)
            if order is not None:
                listed = order.groups[0].blocks
                assert max(listed) < life.planned, "a block is listed before its pass"
                assert not set(listed) & missing, "a block is listed that lacks a page"
                assert not set(listed) & life.there, "a block is listed that is there already"
            parts.append((life, life.planned, order, life.record.marks.mark))
        self.plans.append(parts)

    @precondition(lambda self: self.plans)
    @rule()
    def the_oldest_pass_runs(self) -> None:
        parts = self.plans.pop(0)
        for life, _, order, _ in parts:
            queued, shed = self.requests.queue_saves([] if order is None else [order], self.now)
            RequestMachine.shed += shed is not None
            if queued:
                assert life.record.is_open
                self.queued(queued[0])
                left_behind = set(life.record.marks.shed_blocks)
                assert not left_behind or max(queued[0].groups[0].blocks) < min(left_behind), "a chain with a hole is queued"
        for life, planned, _, first in parts:
            if life.closed:
                continue
            self.compute(life, range(life.kv, planned))
            life.kv = max(life.kv, planned)
            tail = tuple(life.table[first:planned])
            self.requests.ran(life.record, planned * T, planned, first, (tail,) * GROUPS)
            life.there.update(block for block in range(planned) if life.hashes[block] in self.known)

    @precondition(lambda self: self.plans)
    @rule()
    def the_engine_drops_its_plans(self) -> None:
        self.plans.clear()
        for life in self.lives.values():
            life.planned = life.kv

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), cancels=st.booleans(), another_time=st.integers(0, 2))
    def end(self, data: st.DataObject, cancels: bool, another_time: int) -> None:
        if another_time:
            return  # so that most requests live long enough to get into trouble
        life = data.draw(st.sampled_from(list(self.lives.values())))
        record = life.record
        before, was_open = set(record.saves), record.is_open
        loading = record.load is not None
        if cancels:
            effects = self.requests.cancel(record)
            assert set(record.saves) == before
        else:
            effects = self.requests.finish(record, upto=min(record.computed, record.chain.length) // T)
        orders = [effect for effect in effects if isinstance(effect, SaveOrder)]
        assert not orders or (was_open and not cancels and not loading)
        self.carry_out(effects)

    @precondition(lambda self: self.lives and len(self.free_pages) >= BLOCKS)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(list(self.lives.values())))
        was_open = life.record.is_open
        effects = self.requests.preempt(life.record)
        assert bool(effects) is was_open
        self.carry_out(effects)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), another_time=st.integers(0, 2))
    def a_hold_lasts_too_long(self, data: st.DataObject, another_time: int) -> None:
        if another_time:
            return
        life = data.draw(st.sampled_from(list(self.lives.values())))
        was_held = life.record.is_held
        effects = self.requests.hold_expired(life.record)
        assert bool(effects) is was_held
        self.carry_out(effects)

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0

    # -- messages

    @precondition(lambda self: self.to_worker)
    @rule(count=st.integers(1, 3))
    def the_worker_hears(self, count: int) -> None:
        for _ in range(min(count, len(self.to_worker))):
            self.worker.hears(self.to_worker.popleft())

    @precondition(lambda self: self.worker.reports)
    @rule(count=st.integers(1, 3))
    def the_scheduler_hears(self, count: int) -> None:
        for _ in range(min(count, len(self.worker.reports))):
            self.scheduler_takes(self.worker.reports.popleft())

    def scheduler_takes(self, message: Report) -> None:
        self.told.append(message)
        life = self.lives.get(message.incarnation)
        match message:
            case LoadResult():
                assert life is not None, "a request closed before its load ended"
                assert life.hold is not None
                self.lent.pop(message.load_id)
                hashes = {h for group in life.hold.groups for h in group.hashes}
                if message.state is LoadState.LOADED:
                    life.kv = life.planned = life.kv + life.hold.tokens // T
                    assert all(
                        self.worker.content[page] == held for page, held in self.worker.pages_of(life.hold.groups).items()
                    )
                    life.there.update(block for group in life.hold.groups for block in group.blocks)
                    self.known |= hashes
                if message.state is LoadState.FAILED:
                    self.known -= hashes
                self.carry_out(self.requests.load_ended(message))
                # It may be what a preempted request waited for: that goes on with other pages then.
                goes_on = life.record.incarnation == message.incarnation
                assert message.state is LoadState.LOADED or not goes_on or life.record.valid_to == life.kv * T
            case SaveResult():
                if life is not None:
                    self.pinned.pop(message.save_id, None)
                    life.on_their_way.difference_update(message.stored, message.refused, message.dropped)
                    life.there.update(message.stored)
                    self.known |= {life.hashes[block] for block in message.stored}
                self.carry_out(self.requests.save_ended(message, self.now))
            case PagesUnread():
                self.carry_out(self.requests.pages_unread(message))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def an_old_message_comes_again(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.told))
        effects: list[Effect] = []
        match message:
            case LoadResult():
                effects = self.requests.load_ended(message)
            case SaveResult():
                effects = self.requests.save_ended(message, self.now)
            case PagesUnread() if message.incarnation in self.worker.given_back:
                effects = self.requests.pages_unread(message)
            case PagesUnread():
                pass  # while its request lives it may be awaited again
        assert effects == []

    # -- the worker's flows

    @rule()
    def a_loader_takes_up_a_load(self) -> None:
        self.worker.take_up_load()

    @precondition(lambda self: self.worker.loaders)
    @rule(data=st.data())
    def a_copy_begins(self, data: st.DataObject) -> None:
        self.worker.begin_copy(data.draw(st.sampled_from(self.worker.loaders)))

    @precondition(lambda self: self.worker.copies)
    @rule(data=st.data())
    def a_copy_ends(self, data: st.DataObject) -> None:
        self.worker.end_copy(data.draw(st.sampled_from(self.worker.copies)))

    @precondition(lambda self: self.worker.loaders)
    @rule(data=st.data(), arrives=st.booleans())
    def a_loader_ends(self, data: st.DataObject, arrives: bool) -> None:
        self.worker.end_load(data.draw(st.sampled_from(self.worker.loaders)), arrives=arrives)

    @rule()
    def a_saver_takes_up_a_save(self) -> None:
        self.worker.take_up_save()

    @precondition(lambda self: self.worker.savers)
    @rule(data=st.data())
    def a_read_begins(self, data: st.DataObject) -> None:
        self.worker.begin_read(data.draw(st.sampled_from(self.worker.savers)))

    @precondition(lambda self: self.worker.reads)
    @rule(data=st.data())
    def a_read_ends(self, data: st.DataObject) -> None:
        self.worker.end_read(data.draw(st.sampled_from(self.worker.reads)))

    @precondition(lambda self: self.worker.savers)
    @rule(data=st.data())
    def a_saver_ends(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.worker.savers))
        if ticket not in self.worker.reads:
            self.worker.end_save(ticket, refused=data.draw(st.sets(st.sampled_from(ticket.order.groups[0].blocks))))

    # -- bookkeeping

    def compute(self, life: Life, blocks: range) -> None:
        for block in blocks:
            for group in range(GROUPS):
                self.worker.content[group, life.table[block]] = life.hashes[block]

    def queued(self, order: SaveOrder) -> None:
        blocks = order.groups[0].blocks
        self.pinned[order.save_id] = order.incarnation, self.worker.pages_of(order.groups)
        life = self.lives[order.incarnation]
        assert life.on_their_way.isdisjoint(blocks), "a block is handed over twice"
        life.on_their_way.update(blocks)
        self.to_worker.append(order)

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Withdrawal():
                    self.to_worker.append(effect)
                case SaveOrder():
                    self.queued(effect)
                case LoadHold():
                    life = next(life for life in self.lives.values() if life.hold is effect)
                    assert effect.load_id not in {record.order.load_id for record in self.worker.copies}
                    life.hold = None
                case Shed():
                    RequestMachine.shed += 1
                case _:
                    self.close(effect.request_id, effect.incarnation)

    def close(self, request_id: str, incarnation: int) -> None:
        assert incarnation not in self.worker.given_back, "a request closed twice"
        life = self.lives.pop(incarnation)
        record = life.record
        assert record.request_id == request_id
        self.worker.given_back.add(incarnation)
        life.closed = True
        touching = {record.order.incarnation for record in self.worker.copies}
        touching |= {ticket.order.incarnation for ticket in self.worker.reads}
        assert incarnation not in touching, "pages were given back while a copy touches them"
        self.pinned = {save_id: held for save_id, held in self.pinned.items() if held[0] != incarnation}
        self.free_pages += life.table
        # The next owner of these pages writes what it likes.
        self.worker.content.update({(group, page): None for group in range(GROUPS) for page in life.table})
        if record.phase is Phase.CLOSED:
            RequestMachine.closed += 1
            return
        assert (record.phase, record.load, record.saves, record.computed) == (Phase.OPEN, None, {}, 0)
        RequestMachine.preempted += 1
        # The same life, with other pages: what is in the pool is there still, and nothing is computed or on its way.
        again = self.lives[record.incarnation] = Life(record, [self.free_pages.pop(0) for _ in range(BLOCKS)])
        again.there = {block for block in life.there if record.marks.is_stored(block)}

    @invariant()
    def the_connectors_hands_hold_what_they_should(self) -> None:
        assert self.requests.pages.loading == {page for pages in self.lent.values() for page in pages}
        assert self.requests.pages.saving == Counter(page for _, pages in self.pinned.values() for page in pages)
        assert sorted(record.incarnation for record in self.requests.records) == sorted(self.lives)

    @invariant()
    def no_mark_claims_a_block_that_nobody_vouches_for(self) -> None:
        for life in self.lives.values():
            claimed = {block for block in range(BLOCKS) if not life.record.marks.is_open(block)}
            assert life.on_their_way <= claimed <= life.there | life.on_their_way
            assert life.record.marks.mark == min(set(range(BLOCKS + 1)) - claimed)

    @invariant()
    def no_more_is_under_way_than_there_may_be(self) -> None:
        assert self.backlog.bytes <= self.bounds.bytes
        assert self.backlog.passes <= self.bounds.passes
        assert self.backlog.bytes >= sum(len(list(pages)) for _, pages in self.pinned.values())

    def teardown(self) -> None:
        """Whatever happened, cancelling everything and letting the work run out closes every request and leaves nothing."""
        for life in list(self.lives.values()):
            self.carry_out(self.requests.cancel(life.record))
        while self.to_worker:
            self.the_worker_hears(1)
        self.worker.run_out()
        while self.worker.reports:
            self.the_scheduler_hears(1)
        assert (len(self.requests), self.lives) == (0, {})
        assert (self.requests.pages.loading, self.requests.pages.saving) == (set(), {})
        assert sorted(self.free_pages) == list(range(PAGES))
        assert self.backlog.under_way == (0, 0)


@pytest.mark.parametrize("bounds", [BacklogBounds(2**40, 2**40), BacklogBounds(4, 1)], ids=["roomy", "tight"])
def test_S2_S6_S7_S12_D2_D6_D8_D9_M6_M7_pages_are_given_back_once_and_never_touched_afterwards(
    worker: "type[Worker]", bounds: BacklogBounds
) -> None:
    limits = settings(max_examples=150, stateful_step_count=60, deadline=None)
    RequestMachine.worker_half, RequestMachine.bounds = worker, bounds
    RequestMachine.closed = RequestMachine.preempted = RequestMachine.shed = 0
    for _ in range(3):
        run_state_machine_as_test(RequestMachine, settings=limits)
        # What is drawn at random may leave a kind of happening out, all through a run.
        if RequestMachine.preempted and (RequestMachine.shed or bounds.bytes == 2**40):
            break
    assert RequestMachine.closed >= 2 * limits.max_examples, "each run opens two requests at least, and closes them"
    assert RequestMachine.preempted > 0
    assert (RequestMachine.shed > 0) == (bounds.bytes < 2**40)
