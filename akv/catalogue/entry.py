"""What the catalogue of events is made of, and the catalogue itself."""

import logging

import msgspec

#: The levels of the catalogue, as the standard library numbers them.
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

#: What `step()` adds to the fields of its event.
STEP_FIELDS = ("phase", "outcome", "duration_s")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the catalogue. Names are stable: dashboards and alerts are built on them."""

    #: Dotted, "akv.<part>.<what happened>".
    name: str
    #: "debug", "info", "warning" or "error".
    level: str
    #: Every field that it may carry. Units are in the names, as everywhere.
    fields: tuple[str, ...]
    #: For the reference: when it is emitted, and what a reader does about it.
    meaning: str


CATALOGUE: dict[str, Event] = {}


def event(name: str, level: str, fields: str, meaning: str) -> Event:
    """Enter an event. `fields`: names, apart by blanks."""
    entry = Event(name=name, level=level, fields=tuple(fields.split()), meaning=meaning)
    CATALOGUE[name] = entry
    return entry
