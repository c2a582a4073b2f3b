"""What vLLM says about requests in its outputs and statistics, put together for answers."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreEventType

from akv_testing.vllm.protocol import Answer


class Answers:
    """What was seen of one engine's requests."""

    def __init__(self) -> None:
        #: By vLLM's id of the request, without what it appends to ours.
        self._prefills: dict[str, Any] = {}
        self._preemptions: Counter[str] = Counter()
        self._counted: defaultdict[str, float] = defaultdict(float)

    def see(self, outputs: Iterable[Any]) -> None:
        """Outputs of the engine's core, `EngineCoreOutput`."""
        for output in outputs:
            name = named(output.request_id)
            if output.prefill_stats is not None:
                self._prefills[name] = output.prefill_stats
            preempted = [event for event in output.events or () if event.type == EngineCoreEventType.PREEMPTED]
            self._preemptions[name] += len(preempted)

    def see_stats(self, stats: Any) -> None:
        """Its statistics, `SchedulerStats` or None."""
        for name, count in ((stats and stats.kv_connector_stats) or {}).items():
            if isinstance(count, int | float):
                self._counted[name] += count

    def of(self, output: Any) -> Answer:
        """The answer that a `RequestOutput` ends."""
        name = named(output.request_id)
        (completion,) = output.outputs
        prefill = self._prefills.pop(name)
        tokens = list(completion.token_ids)
        return Answer(
            tokens=tokens,
            logprobs=[each[token].logprob for each, token in zip(completion.logprobs, tokens, strict=True)],
            finish_reason=str(completion.finish_reason),
            local_tokens=prefill.num_local_cached_tokens,
            external_tokens=prefill.num_external_cached_tokens,
            cached_tokens=output.num_cached_tokens,
            preemptions=self._preemptions.pop(name, 0),
        )

    def counted(self) -> dict[str, float]:
        """What the connector counted since the last call."""
        counted = dict(self._counted)
        self._counted.clear()
        return counted


def named(request_id: str) -> str:
    """As we named it: vLLM appends to that."""
    return request_id.partition("-")[0]
