"""What akv's events say of loads and saves."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import structlog


class Load(NamedTuple):
    """One load that came to its end."""

    bytes: int
    direct_bytes: int
    seconds: float

    @property
    def in_place(self) -> bool:
        """Whether every page was read where another process lends it."""
        return self.bytes == self.direct_bytes


class Moved:
    """Keeps what the connector's events say it moved, by request; a processor of structlog."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.saved_bytes: dict[str, int] = {}

    def listen(self) -> None:
        """From now on. Warnings and errors go to standard error, the rest nowhere."""
        structlog.configure(
            processors=[self, structlog.processors.JSONRenderer(default=str)],
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )

    def __call__(self, logger: Any, method: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note, and pass on what someone should read."""
        request = event.get("request_id", "")
        if event["event"] == "akv.load.complete":
            self.loads[request] = Load(event["bytes"], event["direct_bytes"], event["duration_s"])
        elif event["event"] == "akv.save.complete":
            self.saved_bytes[request] = self.saved_bytes.get(request, 0) + event["bytes"]
        if method not in {"warning", "error", "critical"}:
            raise structlog.DropEvent
        return {"level": method, **event}
