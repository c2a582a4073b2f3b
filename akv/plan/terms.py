"""What the two halves of a connector must agree on, compared once at start (D1)."""

import msgspec

from akv.errors import SettingsError
from akv.plan.integrity import size_suffix
from akv.plan.keys import KeySpace, ServerKeys, layout_fingerprint
from akv.values.layout import Layout
from akv.values.messages import MESSAGE_VERSION, Terms
from akv.values.settings import Settings


def terms_of(
    settings: Settings, layout: Layout, keys: KeySpace | ServerKeys, page_counts: tuple[int, ...], lookahead: int = 0
) -> Terms:
    """What a half says of itself. `lookahead` is that of its drafter (K2)."""
    return Terms(
        version=MESSAGE_VERSION,
        load_mode=settings.load_mode,
        role=settings.role,
        layout=layout_fingerprint(layout),
        key_space=keys.space,
        world=layout.world,
        lookahead=lookahead,
        page_counts=page_counts,
        trailer=size_suffix(settings.integrity, settings.integrity_secret.encode()),
    )


def check_terms(scheduler: Terms, worker: Terms) -> None:
    """Refuse a worker half whose terms differ: it would exchange bytes or messages that mean something else.

    Raises SettingsError naming the first term that differs and both values (fault of the deployment: two ranks were started
    with different settings, layouts or versions).
    """
    for name in Terms.__struct_fields__:
        ours, theirs = getattr(scheduler, name), getattr(worker, name)
        if ours != theirs:
            raise SettingsError(
                f"terms.{name}",
                msgspec.to_builtins(theirs),
                f"the scheduler half has {ours!r}, this worker half {theirs!r}",
                "Start every rank with the same settings, layout and version of akv.",
            )
