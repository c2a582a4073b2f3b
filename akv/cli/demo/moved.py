"""How many bytes akv moved, read off its events."""

from collections.abc import Mapping
from typing import Any


class BytesMoved:
    """Adds up what the connector's events say it moved; a processor of structlog."""

    def __init__(self) -> None:
        self.loaded = 0
        self.saved = 0

    def __call__(self, logger: Any, method: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Count, and pass on."""
        if event["event"] == "akv.load.complete":
            self.loaded += event["bytes"]
        elif event["event"] == "akv.save.complete":
            self.saved += event["bytes"]
        return event
