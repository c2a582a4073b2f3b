"""What the stand-in's runtime knows of loads and saves that go on outside its passes."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from akv_testing.engines.tensorrt_llm.contract import check_answer
from akv_testing.engines.tensorrt_llm.interface import RESERVATION_METHODS, ConnectorScheduler, PrefixLoad
from akv_testing.engines.tensorrt_llm.requests import StandInRequest


class Transfers:
    """Loads and saves of one server. An end counts when every rank has told it: `withheld` plays another rank."""

    def __init__(self, scheduler: Any, worker: Any, *, restarts: bool) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._restarts = restarts
        name = RESERVATION_METHODS[0][1]
        #: Whether prefixes are reserved in place of queries.
        self.reserves = getattr(type(scheduler), name) is not getattr(ConnectorScheduler, name)
        #: Requests and reservations whose end another rank has not told yet.
        self.withheld: set[int] = set()
        self.loads_async = False
        self._new_loads: list[int] = []
        self._new_saves: list[int] = []
        self._announced: tuple[set[int], set[int]] = set(), set()
        self._here: tuple[set[int], set[int]] = set(), set()
        self._ids = count(1)
        self._accepted: dict[int, tuple[StandInRequest, PrefixLoad]] = {}
        self._dispatched: set[int] = set()
        self._prefixes_here: set[int] = set()

    def park(self, request_id: int) -> None:
        """A request waits for its load."""
        self._new_loads.append(request_id)

    def save(self, request_id: int) -> None:
        """A request's pages wait for its saves."""
        self._new_saves.append(request_id)

    def settle(self) -> tuple[list[int], list[int], set[int]]:
        """Requests whose saves ended, whose loads ended, and those of the latter that lost a page."""
        saved, loaded = self._worker.get_finished(self._new_saves, self._new_loads)
        announced_saves, announced_loads = self._announced
        announced_saves.update(self._new_saves)
        announced_loads.update(self._new_loads)
        self._new_saves, self._new_loads = [], []
        for ended, announced, here in ((saved, announced_saves, self._here[0]), (loaded, announced_loads, self._here[1])):
            if not announced.issuperset(ended) or len(set(ended)) < len(ended):
                raise AssertionError(f"{ended} were named as ended, and only {announced} were announced")
            announced.difference_update(ended)
            here.update(ended)
        agreed = [sorted(here - self.withheld) for here in self._here]
        for here, ids in zip(self._here, agreed, strict=True):
            here.difference_update(ids)
        failed = self._worker.take_failed_async_load_requests() if self._restarts else set()
        return agreed[0], agreed[1] + self._prefixes_ended(), failed

    def failed_in_pass(self) -> set[int]:
        """Requests of the bound pass that lost a page: out of it, their saves with them."""
        failed: set[int] = self._worker.take_failed_load_requests() if self._restarts else set()
        if failed:
            self._worker.drop_bound_saves(failed)
        return failed

    # -- reservations

    def reserve(self, request: StandInRequest, computed: int) -> tuple[int, int]:
        """A fresh id, and how many tokens are protected under it."""
        reservation_id = next(self._ids)
        answer = self._scheduler.reserve_prefix(request, computed, reservation_id)
        check_answer(answer)
        return reservation_id, answer[0]

    def accepted(self, request: StandInRequest, load: PrefixLoad) -> None:
        """The reservation has pages."""
        self._accepted[load.reservation_id] = request, load

    def dispatched(self, loads: Sequence[PrefixLoad]) -> None:
        """Their loads have begun, but for those that were released meanwhile."""
        self._dispatched.update(load.reservation_id for load in loads if load.reservation_id in self._accepted)

    def release_unstarted(self, request: StandInRequest) -> bool:
        """Give a reservation back whose load has not begun. False if it has."""
        for reservation_id, (owner, load) in list(self._accepted.items()):
            if owner is request:
                if reservation_id in self._dispatched:
                    return False
                del self._accepted[reservation_id]
                self._scheduler.release_prefix_reservation(request, reservation_id, load.start, load.end)
        return True

    def _prefixes_ended(self) -> list[int]:
        if not self.reserves:
            return []
        # Unknown and late ids are ignored.
        self._prefixes_here |= set(self._worker.get_finished_prefix_loads()) & self._dispatched
        ended = self._prefixes_here - self.withheld
        self._prefixes_here -= ended
        self._dispatched -= ended
        requests = []
        for reservation_id in sorted(ended):
            request, load = self._accepted.pop(reservation_id)
            self._scheduler.release_prefix_reservation(request, reservation_id, load.start, load.end)
            requests.append(request.request_id)
        return requests
