"""What TensorRT-LLM refuses: classes that declare too little at start, and answers that cannot be."""

from types import SimpleNamespace
from typing import Any

from akv_testing.engines.tensorrt_llm.interface import RESERVATION_METHODS, ConnectorScheduler, ConnectorWorker
from akv_testing.engines.tensorrt_llm.memory import StandInCache


class Refused(Exception):
    """The runtime does not serve with this connector."""


def check_answer(answer: Any) -> None:
    """Raise Refused for an answer to a query that is none."""
    tokens, is_async = answer
    if type(tokens) is not int or tokens < 0 or type(is_async) is not bool:
        raise Refused(f"{answer!r} is no answer")
    if not tokens and is_async:
        raise Refused("a load of nothing cannot be asynchronous")


def reserves(classes: Any) -> bool:
    """Whether these classes reserve prefixes. Raises Refused for a part of the methods only."""
    bases = {"scheduler": ConnectorScheduler, "worker": ConnectorWorker}
    found = [getattr(getattr(classes, half), name) is not getattr(bases[half], name) for half, name in RESERVATION_METHODS]
    if any(found) and not all(found):
        raise Refused("prefix reservations require all three methods")
    return all(found)


def declares(kind: type[Any], name: str) -> bool:
    """What is not exactly True is not declared."""
    return getattr(kind, name, False) is True


def check_classes(classes: Any, args: SimpleNamespace, cache: StandInCache, *, asks_early: bool) -> None:
    """Raise Refused for a pair of classes that this server cannot run with."""
    scheduler, worker = classes.scheduler, classes.worker
    if args.enable_attention_dp and not (
        declares(scheduler, "supports_attention_dp") and declares(worker, "supports_attention_dp")
    ):
        raise Refused("attention data parallelism")
    if args.speculative_config is not None and not declares(scheduler, "supports_speculative_prefill"):
        raise Refused("a drafter")
    if asks_early and not declares(scheduler, "supports_admission_query"):
        raise Refused("a query at admission")
    if reserves(classes) and declares(scheduler, "reports_failed_loads"):
        raise Refused("failed loads are not reported beside prefix reservations")
    if any(shape.window is not None for shape in cache.groups) and not reserves(classes):
        raise Refused("window groups need prefix reservations")
