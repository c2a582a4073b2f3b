"""What akv says about itself: the events of `akv/catalogue/` (V1), and the only way to emit them.

The library configures no logging. Where the application configured structlog, events go there; else to the standard library's
logger "akv", so that by default nothing is printed but warnings and errors, on stderr. Prompt text, token values and salts
never go into an event; page keys only into one of level debug (X6).
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import structlog

from akv.catalogue import *  # noqa: F403 - `observe.NAME` is how the rest of akv names an event
from akv.catalogue import LEVELS, Event

#: Keys the hashes of names that must not be readable in a log, nor comparable between the logs of two processes.
_PROCESS_KEY = secrets.token_bytes(32)


def emit(event: Event, *, error: BaseException | None = None, **fields: object) -> None:
    """Say that `event` happened. Never raises for what the event says; costs about a microsecond where nobody listens.

    `error` is logged with its traceback. `fields` are names of the catalogue's entry; the architecture tests read every call.
    """
    _send(event, event.level, error, fields)


@contextmanager
def step(event: Event, *, clock: Callable[[], float] = anyio.current_time, **fields: object) -> Iterator[dict[str, object]]:
    """Emit `event` twice around a block: phase "begin" at level debug, and phase "end" with `outcome` and `duration_s`.

    Yields a mapping; what the block puts into it is added to the end's fields. The outcome is "ok"; or "error" after an
    exception, which passes on, and then the end is at level warning at least; or "cancelled" after a BaseException that is no
    Exception, as the cancellations of asyncio and trio are. `clock` returns seconds; the default is the running loop's, so off
    a loop pass `time.monotonic`.
    """
    more: dict[str, object] = {}
    began = clock()
    _send(event, "debug", None, {**fields, "phase": "begin"})
    outcome, level = "ok", event.level
    try:
        yield more
    except Exception:
        outcome, level = "error", max(event.level, "warning", key=LEVELS.__getitem__)
        raise
    except BaseException:
        outcome = "cancelled"
        raise
    finally:
        # No exception is passed along: it goes on to somebody who handles or reports it.
        _send(event, level, None, {**fields, **more, "phase": "end", "outcome": outcome, "duration_s": clock() - began})


def secret_id(text: str | None) -> str:
    """A short name for a salt, a tenant or a conversation: the same within this process, and without meaning outside it."""
    return hashlib.blake2b((text or "").encode("utf-8", "surrogatepass"), key=_PROCESS_KEY, digest_size=8).hexdigest()


def _send(event: Event, level: str, error: BaseException | None, fields: dict[str, object]) -> None:
    if structlog.is_configured():
        # A fresh proxy each time: an application, or a test, may configure structlog again.
        log = structlog.get_logger("akv")
        if error is not None:
            fields = {**fields, "exc_info": error}
        getattr(log, level)(event.name, **fields)
        return
    logger = logging.getLogger("akv")
    if logger.isEnabledFor(LEVELS[level]):
        text = " ".join([event.name, *(f"{name}={value!r}" for name, value in fields.items())])
        extra = {"akv_event": event.name, "akv_fields": fields}
        logger.log(LEVELS[level], "%s", text, exc_info=error, extra=extra)
