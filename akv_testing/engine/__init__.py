"""The reference engine: a real, small, asynchronous LLM server core that embeds akv the way a production engine would.

Needs torch. `open_engine()` is where to start reading; `schedule.py` decides what a pass computes, `step.py` computes it with
`model.py` and `drafter.py`, `akv.host` books the pages.
"""

from akv_testing.engine.config import AttentionGroup, EngineConfig, ModelConfig
from akv_testing.engine.engine import Engine, EngineClosed, open_engine
from akv_testing.engine.job import Result
from akv_testing.engine.model import Model
from akv_testing.engine.pages import Pages, layout_of
from akv_testing.engine.presets import (
    DEMO,
    DEMO_DRAFTER,
    DEMO_SLIDING,
    DEMO_SLIDING_DRAFTER,
    TINY,
    TINY_DRAFTER,
    TINY_SLIDING,
    TINY_SLIDING_DRAFTER,
)
from akv_testing.engine.quarantine import capabilities_of

__all__ = [
    "DEMO",
    "DEMO_DRAFTER",
    "DEMO_SLIDING",
    "DEMO_SLIDING_DRAFTER",
    "TINY",
    "TINY_DRAFTER",
    "TINY_SLIDING",
    "TINY_SLIDING_DRAFTER",
    "AttentionGroup",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "Model",
    "ModelConfig",
    "Pages",
    "Result",
    "capabilities_of",
    "layout_of",
    "open_engine",
]
