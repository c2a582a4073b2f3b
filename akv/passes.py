"""Plans of passes in the scheduler half: made before the forward, ended behind it, or dropped (S1, S2, S4, W3).

`akv/pass_parts.py` reads what the engine says of a pass, `plan/ending.py` and `ownership/listing.py` decide what is listed,
and `ownership/plans.py` keeps what is open. Synchronous: `akv/halves.py` waits for the copies between `take` and `hand_over`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from anyio import current_time

from akv import observe
from akv.errors import EngineContractError
from akv.flow.snapshot import Taken
from akv.ownership.plans import Plans
from akv.ownership.request_record import RequestRecord
from akv.ownership.requests import Requests
from akv.pass_parts import Part, PassParts, Planned
from akv.plan.ending import Ending
from akv.ports.device import PassEvent
from akv.services.reporter import report_shed
from akv.settings import Settings
from akv.values.messages import LoadOrder, PassPlan, SaveOrder, Withdrawal
from akv.values.requests import Scheduled


class WorkerEntries:
    """Where the scheduler half's messages go. Set once, before the first request."""

    #: Marks the present end of the execution stream. Raises DeviceError.
    fence: Callable[[], PassEvent]
    accept_load: Callable[[LoadOrder, PassEvent], None]
    #: The number of the plan that has ended, of which these saves are to be published; None for a request that finished.
    accept_saves: Callable[[int | None, Sequence[SaveOrder], PassEvent, Mapping[int, Taken]], None]
    #: The engine has planned a pass, whatever it saves.
    pass_begins: Callable[[], None]
    #: A plan that saves something asks for its slots; it was dropped and gives them back.
    plan_arrived: Callable[[PassPlan], None]
    plan_dropped: Callable[[int], None]
    withdraw: Callable[[Withdrawal], None]


class Passes:
    """The passes of one server."""

    def __init__(
        self,
        settings: Settings,
        requests: Requests,
        reader: PassParts,
        ending: Ending,
        worker: WorkerEntries,
        most_blocks: int,
        saves: Callable[[], bool],
    ) -> None:
        """`most_blocks`: those that one pass looks at for saving. What can be hashed in a quarter of a millisecond (L3): a
        pass computes fewer, as a rule; what is left of a long local match, say, comes with the next passes. `saves`: whether
        anything is listed for saving at this moment.
        """
        self._settings = settings
        self._requests = requests
        self._reader = reader
        self._ending = ending
        self._worker = worker
        self._saves = saves
        self._tokens_per_block = ending.tokens_per_block
        self._plans: Plans[Planned] = Plans()
        self._most_blocks = most_blocks

    def plan(self, scheduled: Iterable[Scheduled]) -> PassPlan:
        """What the coming pass is to save (S1). Changes no request and no mark (S2)."""
        now = current_time()
        parts: list[Part] = []
        saves: list[SaveOrder] = []
        windows: list[SaveOrder] = []
        seen: set[int] = set()
        most, saves_now = self._most_blocks, self._saves()
        ahead = self._ahead()
        for item in scheduled:
            record = self._scheduled(item, seen)
            part = self._reader.read(record, item, ahead.get(record.incarnation, ()))
            parts.append(part)
            if saves_now:
                windows += self._window_saves(part)
            if saves_now and most:
                looked_at, order = self._requests.listing.some_blocks(record, part.end, part.tail, part.first, now, most)
                most -= looked_at
                if order is not None:
                    saves.append(order)
            if part.closes and saves_now and (again := self._saves_again(part, item)) is not None:
                saves.append(again)
        ordered = (*windows, *saves) if self._settings.window_first else (*saves, *windows)
        plan = PassPlan(plan_id=self._plans.next_id(), saves=ordered)
        self._plans.add(Planned(plan, tuple(parts)))
        self._worker.pass_begins()
        if ordered:
            self._worker.plan_arrived(plan)
        return plan

    def _ahead(self) -> dict[int, list[Part]]:
        """The parts of plans that have not ended, oldest first, by the incarnation of their request."""
        ahead: dict[int, list[Part]] = {}
        for planned in self._plans.contents:
            for part in planned.parts:
                ahead.setdefault(part.incarnation, []).append(part)
        return ahead

    def _window_saves(self, part: Part) -> list[SaveOrder]:
        """The window pages that make the prompt's end resumable (W3); their slots are asked for with the plan (S4)."""
        if not part.closing:
            return []
        # A sequence that computed much asks for its window pages again, too: without them its blocks make no end.
        again = self._computed_much(part)
        order = self._requests.listing.windows(part.record, part.closing, snapshot=True, again=again)
        return [] if order is None else [order]

    def _saves_again(self, part: Part, item: Scheduled) -> SaveOrder | None:
        """A sequence that computed much lists its stored blocks again (S8)."""
        if not self._computed_much(part):
            return None
        record = part.record
        order = self._requests.listing.again(record, part.end, item.pages)
        for columns in () if order is None else order.groups:
            self._reader.check_pages(record, columns.group, columns.pages, columns.blocks)
        return order

    def _computed_much(self, part: Part) -> bool:
        least, began_at = self._settings.resave_min_tokens, part.record.windows.began_at
        return bool(least) and part.computed - (part.before if began_at is None else began_at) >= least

    def take(self, plan: PassPlan) -> tuple[Planned, PassEvent]:
        """The planned pass is queued on the execution stream: the plan ends, what it computed is noted, and `hand_over`
        follows, given the pass's event. Raises DeviceError.
        """
        # First what may fail: then the plan is still open, and may be dropped.
        try:
            after = self._worker.fence()
        except BaseException:
            self._may_have_run(self._plans.peek(plan.plan_id))
            raise
        planned = self._end(plan, "superseded by a later pass")
        # Here, and not behind the wait for the copies: passes are noted in the order in which they ran, and one that is cut
        # short, or whose copies fail, computed and released the same pages as any other.
        # Nobody will store the pages of a request that has begun to end, or was preempted: it may have got them back.
        counting = [part for part in planned.parts if part.counts]
        for part in counting:
            self._ran(part)
        here = {part.incarnation for part in counting}
        wanted = tuple(order for order in planned.plan.saves if order.incarnation in here)
        return planned._replace(plan=msgspec.structs.replace(planned.plan, saves=wanted)), after

    def _ran(self, part: Part) -> None:
        end = part.end if self._saves() else 0
        self._requests.ran(part.record, part.computed, end, part.first, part.tail, self._most_blocks, history=part.history)
        if part.closes and part.closing and self._saves():
            self._tell_end(part)
            for columns in part.closing:
                # Not listed, since the pool is known to hold it (S13): nor will `finish` list it.
                part.record.windows.there(columns.group, self._requests.listing.known(part.record, columns))
        part.record.windows.ran(part.before, part.held, closes=part.closes)

    @staticmethod
    def _may_have_run(planned: Planned | None) -> None:
        """A pass of which nobody says whether it ran: the engine may have released window pages behind it."""
        for part in () if planned is None else planned.parts:
            if part.counts:
                part.record.windows.held = ()

    def no_more_passes(self) -> None:
        """The connector closes: nobody can say any more whether the passes under way ran."""
        for planned in self._plans.contents:
            self._may_have_run(planned)

    def hand_over(self, planned: Planned, after: PassEvent, snapshots: Mapping[int, Taken]) -> None:
        """What is to be copied at the pass has been: hand its saves over. Raises DeviceError."""
        queued: list[SaveOrder] = []
        try:
            if snapshots:
                # Behind the copies: whatever waits for the pass's event then waits for them, too (S3).
                after = self._worker.fence()
            copied = (order for order in planned.plan.saves if order.save_id in snapshots or not order.snapshot)
            queued, shed = self._requests.queue_saves(copied, current_time())
            self._worker.accept_saves(planned.plan.plan_id, queued, after, snapshots)
            if shed is not None:
                report_shed(shed)
        finally:
            handed_over = {order.save_id for order in queued}
            for save_id, snapshot in snapshots.items():
                if save_id not in handed_over:
                    snapshot.leave()

    def _tell_end(self, part: Part) -> None:
        """Count what a prompt's end was worth: how many of the ends that the rewind wants have their window (W4)."""
        record = part.record
        end = record.prompt_blocks
        observe.emit(
            observe.WINDOW_END,
            request_id=record.request_id,
            incarnation=record.incarnation,
            pages=sum(len(columns.pages) for columns in part.closing),
            ends=self._ending.covered_ends(end, part.closing),
            wanted_ends=min(end, self._settings.rewind_tokens // self._tokens_per_block + 1),
        )

    def drop(self, plan: PassPlan, reason: str) -> None:
        """The planned pass will not run."""
        planned = self._end(plan, "superseded by a later pass")
        self._dropped(planned, reason)

    def _scheduled(self, item: Scheduled, seen: set[int]) -> RequestRecord:
        record = self._requests.scheduled(item.request.request_id, item.request.incarnation)
        if record.incarnation in seen:
            raise EngineContractError(
                f"request {record.request_id!r} is scheduled twice in one pass: give each request one part"
            )
        seen.add(record.incarnation)
        return record

    def _end(self, plan: PassPlan, reason: str) -> Planned:
        planned, earlier = self._plans.end(plan.plan_id)
        for other in earlier.values():
            self._dropped(other, reason)
        return planned

    def _dropped(self, planned: Planned, reason: str) -> None:
        self._worker.plan_dropped(planned.plan.plan_id)
        observe.emit(observe.PLAN_DROPPED, plan_id=planned.plan.plan_id, saves=len(planned.plan.saves), reason=reason)
