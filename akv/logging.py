"""Logging for applications that have none: `akv.logging.json()`, one call. The library itself never calls it."""

import sys
from typing import TextIO

import structlog

from akv import observe


def json(stream: TextIO | None = None, level: str = "info") -> None:
    """Configure structlog, for the whole process, to write each event as one JSON object per line.

    Each has `event`, `level`, `timestamp` (UTC, ISO 8601) and the fields of the catalogue. `stream` is stderr unless given,
    since stdout belongs to the program's own output. Events below `level` ("debug", "info", "warning" or "error") are not
    written and cost little. Raises ValueError for another level. Tracebacks carry no local variables: those may hold prompts.
    """
    if level not in observe.LEVELS:
        raise ValueError(f"level is {level!r}: use one of {', '.join(observe.LEVELS)}")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(observe.LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )
