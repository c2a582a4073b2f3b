"""Share the KV cache of asynchronous LLM servers through a Mooncake pool.

This is the public API. Importing it is light: torch, mooncake and trio are loaded by `open_connector()` when it needs them.
"""

from akv.connector import Connector, open_connector
from akv.errors import (
    AkvError,
    ConnectorBroken,
    DependencyError,
    DeviceError,
    EngineContractError,
    LoadCancelled,
    LoadEnded,
    LoadFailed,
    NotOpenError,
    PagesLost,
    PoolError,
    SettingsError,
    TokenError,
)
from akv.plan.tokens import Tokens
from akv.ports import Ports
from akv.ranks import Scheduler, Worker, open_scheduler, open_worker
from akv.request import Load, Request
from akv.services.notices import Changed
from akv.settings import (
    ClientSettings,
    ExplainedSettings,
    Settings,
    StoreSettings,
    check_settings,
    explain_settings,
    read_settings,
)
from akv.units import NO_PAGE, PageIndex
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import LayerGroup, Layout, Region
from akv.values.messages import LoadState, PagesPerGroup, PagesReleased, PassPlan
from akv.values.offers import LookupOutcome, Offer
from akv.values.pressure import BreakerState, Pressure, StagingPressure
from akv.values.requests import Completion, LoadCompleted, SavesCompleted, Scheduled
from akv.values.scope import EMPTY_SCOPE, Lora, Media, Scope

__all__ = [
    "EMPTY_SCOPE",
    "NO_PAGE",
    "AkvError",
    "BreakerState",
    "Changed",
    "ClientSettings",
    "Completion",
    "Connector",
    "ConnectorBroken",
    "DependencyError",
    "DeviceError",
    "EngineCapabilities",
    "EngineContractError",
    "ExplainedSettings",
    "LayerGroup",
    "Layout",
    "Load",
    "LoadCancelled",
    "LoadCompleted",
    "LoadEnded",
    "LoadFailed",
    "LoadState",
    "LookupOutcome",
    "Lora",
    "Media",
    "NotOpenError",
    "Offer",
    "PageIndex",
    "PagesLost",
    "PagesPerGroup",
    "PagesReleased",
    "PassPlan",
    "PoolError",
    "Ports",
    "Pressure",
    "Region",
    "Request",
    "SavesCompleted",
    "Scheduled",
    "Scheduler",
    "Scope",
    "Settings",
    "SettingsError",
    "StagingPressure",
    "StoreSettings",
    "TokenError",
    "Tokens",
    "Worker",
    "check_settings",
    "explain_settings",
    "open_connector",
    "open_scheduler",
    "open_worker",
    "read_settings",
]
