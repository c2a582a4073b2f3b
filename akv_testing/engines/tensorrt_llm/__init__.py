"""A stand-in for TensorRT-LLM: the classes of its connector interface, and an executor that keeps its order of calls.

No wheel of it installs on a machine without a GPU. What it asks of a connector is written here by the engine's own names, so
an adapter is tested against it unchanged; the engine itself is never imported.
"""

from akv_testing.engines.tensorrt_llm.contract import Refused
from akv_testing.engines.tensorrt_llm.engine import StandInEngine, llm_args
from akv_testing.engines.tensorrt_llm.interface import (
    BAD_PAGE_INDEX,
    ConnectorScheduler,
    ConnectorWorker,
    PrefixLoad,
    RequestData,
    SchedulerOutput,
)
from akv_testing.engines.tensorrt_llm.memory import GroupShape, StandInCache
from akv_testing.engines.tensorrt_llm.requests import StandInRequest, State
from akv_testing.engines.tensorrt_llm.server import TOKENS_PER_BLOCK, StandInServer

__all__ = [
    "BAD_PAGE_INDEX",
    "TOKENS_PER_BLOCK",
    "ConnectorScheduler",
    "ConnectorWorker",
    "GroupShape",
    "PrefixLoad",
    "Refused",
    "RequestData",
    "SchedulerOutput",
    "StandInCache",
    "StandInEngine",
    "StandInRequest",
    "StandInServer",
    "State",
    "llm_args",
]
