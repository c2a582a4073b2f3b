"""What akv said about itself while a test ran."""

import logging
from collections.abc import Iterable
from typing import Any


def events_in(records: Iterable[logging.LogRecord], name: str) -> list[dict[str, Any]]:
    """The fields of each event of this name, oldest first. `records`: pytest's `caplog.records`."""
    return [record.__dict__["akv_fields"] for record in records if getattr(record, "akv_event", "") == name]
