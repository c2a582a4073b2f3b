"""The stand-in of `vllm_engine.py` with tensor-parallel ranks: each has its own fakes and its own loop, what is said to them
is pickled, and their answers are counted as vLLM's `KVOutputAggregator` counts them.
"""

import pickle
from typing import Any

from akv.engines.vllm.configuration import Configuration
from akv.engines.vllm.ends import Results
from akv.engines.vllm.layout import Cache
from akv.engines.vllm.rank_role import RankRole
from akv.engines.vllm.ranked_scheduler import RankedSchedulerRole, RankStep
from akv.engines.vllm.scheduler import SchedulerRole
from akv_testing.ranked_server import RankedServer
from akv_testing.server import FakeServer
from akv_testing.vllm_engine import Call, VllmEngine


class Aggregator:
    """What vLLM makes of the answers of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._awaited: dict[tuple[str, str], int] = {}
        self._failed: set[str] = set()

    def join(self, answers: list[Results]) -> Results:
        """What every rank has said by now."""
        sent = self._by_all("sent", [answer.sent for answer in answers])
        received = self._by_all("received", [answer.received for answer in answers])
        self._failed.update(*(answer.failed for answer in answers))
        failed = self._failed & received
        self._failed -= failed
        return Results(sent, received, failed, set())

    @property
    def half_said(self) -> list[tuple[str, str]]:
        """What some ranks have said and others have not."""
        return sorted(self._awaited)

    def _by_all(self, kind: str, said: list[set[str]]) -> set[str]:
        whole = set()
        for request_id in (each for one in said for each in sorted(one)):
            left = self._awaited.pop((kind, request_id), self._ranks) - 1
            if left:
                self._awaited[kind, request_id] = left
            else:
                whole.add(request_id)
        return whole


class RankedVllmEngine(VllmEngine):
    """One engine of several ranks. Arguments are those of `VllmEngine`."""

    def __init__(self, server: RankedServer, **arguments: Any) -> None:
        self.ranked = server
        self.roles: list[RankRole] = []
        self.aggregator = Aggregator(len(server.ranks))
        self._reports: list[list[bytes]] = []
        self.configuration: Configuration
        super().__init__(server.ranks[0], **arguments)

    def _open(self, configuration: Configuration) -> SchedulerRole:
        self.configuration = configuration
        for number, rank in enumerate(self.ranked.ranks):
            self.roles.append(RankRole(number, on_cpu=True))
            self.roles[-1].open(configuration, Cache(rank.layout, []), ports=rank.ports)
        self.session.open_ranks(configuration, [role.hello for role in self.roles], ports=self.ranked.ports)
        loads, size = configuration.settings.role != "producer", self.server.tokens_per_block
        self.ranked_scheduler = RankedSchedulerRole(self.session, size, self.windows, configuration.grace_s, loads=loads)
        return self.ranked_scheduler

    @property
    def devices(self) -> list[tuple[FakeServer, Call]]:
        """As the base says, of each rank that has a worker half."""
        bridges = ((rank, role._bridge) for rank, role in zip(self.ranked.ranks, self.roles, strict=True))
        return [(rank, bridge.call) for rank, bridge in bridges if bridge is not None]

    def close(self) -> None:
        """The scheduler's process ends, then the ranks'."""
        super().close()
        for role in self.roles:
            role.close()

    def execute(self, order: Any, scheduled: dict[str, int]) -> tuple[Results, dict[str, int]]:
        """As the base says, on every rank."""
        steps: list[RankStep] = [pickle.loads(order) for _ in self.roles]  # noqa: S301 - our own
        for role, step in zip(self.roles, steps, strict=True):
            role.before_forward(step)
        self._overwrite()
        sampled = self._forwards(scheduled)
        for role, step in zip(self.roles, steps, strict=True):
            role.after_forward(step)
        answers = [role.results(step) for role, step in zip(self.roles, steps, strict=True)]
        self._reports.append([report for role in self.roles for report in role.take_reports()])
        return self.aggregator.join(answers), sampled

    def _said(self, output: Any) -> bytes:
        return pickle.dumps(self.ranked_scheduler.step_of_ranks(output))

    def _read(self, results: Results) -> None:
        self.ranked_scheduler.reported(self._reports.pop(0), results.received)
