"""akv for TensorRT-LLM: name these classes in `kv_connector_config`.

    kv_connector_config:
      connector_module: akv.engines.tensorrt_llm
      connector_scheduler_class: AkvScheduler
      connector_worker_class: AkvWorker

`AkvReservingScheduler` and `AkvReservingWorker` are for models with sliding windows. The classes are made when they are first
asked for: the engine is imported then, and the settings are read, which decide what the classes declare to it (P2).
"""

from functools import cache
from importlib import import_module
from types import new_class
from typing import Any, NamedTuple

from akv.engines.tensorrt_llm.declarations import scheduler_declarations, worker_declarations
from akv.engines.tensorrt_llm.scheduler import ReservingSchedulerHooks, SchedulerHooks
from akv.engines.tensorrt_llm.session import Seams, Sessions
from akv.engines.tensorrt_llm.worker import ReservingWorkerHooks, RestartingWorkerHooks
from akv.errors import DependencyError
from akv.settings import Settings, read_settings

__all__ = [
    "AkvReservingScheduler",
    "AkvReservingWorker",
    "AkvScheduler",
    "AkvWorker",
    "Bases",
    "Classes",
    "Seams",
    "connector_classes",
]

#: Where the engine keeps its base classes, the newest first.
_HOMES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


class Bases(NamedTuple):
    """The engine's base classes."""

    scheduler: type[Any]
    worker: type[Any]


class Classes(NamedTuple):
    """A pair of classes for `kv_connector_config`."""

    scheduler: type[Any]
    worker: type[Any]


def engine_bases() -> Bases:
    """Import the engine. Raises DependencyError if it is missing, or too old to describe its cache."""
    for home in _HOMES:
        try:
            module = import_module(home)
        except ModuleNotFoundError:
            continue
        bases = Bases(module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker)
        if hasattr(bases.worker, "register_kv_cache_layout"):
            return bases
        raise DependencyError(
            "the installed TensorRT-LLM does not describe its KV cache to connectors (register_kv_cache_layout): akv supports "
            "the releases that do, with kv_cache_config.use_kv_cache_manager_v2. Upgrade it"
        )
    raise DependencyError(
        f"TensorRT-LLM's connector interface cannot be imported, as {' or '.join(_HOMES)}: install it beside akv"
    )


def connector_classes(
    settings: Settings, *, reserves: bool = False, bases: Bases | None = None, seams: Seams | None = None
) -> Classes:
    """Make a pair of classes for these settings. `reserves`: with prefix reservations, without restarts after failed loads.

    Each call makes new classes, which join each other alone. Raises DependencyError without the engine.
    """
    bases = engine_bases() if bases is None else bases
    sessions = Sessions(settings, Seams() if seams is None else seams, reserves=reserves)
    prefix = "AkvReserving" if reserves else "Akv"

    def made(half: str, hooks: type[Any], base: type[Any], declared: dict[str, bool]) -> type[Any]:
        attributes = {"sessions": sessions, "__module__": __name__, "__doc__": hooks.__doc__, **declared}
        return new_class(f"{prefix}{half}", (hooks, base), {}, lambda space: space.update(attributes))

    return Classes(
        made(
            "Scheduler",
            ReservingSchedulerHooks if reserves else SchedulerHooks,
            bases.scheduler,
            scheduler_declarations(settings, reserves=reserves),
        ),
        made(
            "Worker",
            ReservingWorkerHooks if reserves else RestartingWorkerHooks,
            bases.worker,
            worker_declarations(reserves=reserves),
        ),
    )


@cache
def _of_this_process(reserves: bool) -> Classes:
    return connector_classes(read_settings(), reserves=reserves)


def __getattr__(name: str) -> type[Any]:
    for reserves, prefix in ((False, "Akv"), (True, "AkvReserving")):
        if name in {f"{prefix}Scheduler", f"{prefix}Worker"}:
            classes = _of_this_process(reserves)
            return classes.scheduler if name.endswith("Scheduler") else classes.worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
