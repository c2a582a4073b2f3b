"""What the embedding engine can do, declared when the connector opens. What is not declared is not relied on."""

import msgspec

from akv.errors import SettingsError
from akv.values.layout import Layout


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's word. The defaults are what every engine can do; declare more only if it holds for every request."""

    #: Whether the engine keeps the destination pages of a load out of use from `reserve()` to its end. Models with window
    #: groups need it, since window pages are otherwise released while they are written.
    reservations: bool = True
    #: Tokens behind the window for which the engine keeps window pages, from their allocation to the request's end (W4). Never
    #: more than it does: `finish` reads what it declares, and a page that was reused by then is stored under the wrong key.
    window_retention_tokens: int = 0
    #: Whether the engine keeps pages out of use that a failed load, `cancel()`, `finished()` or a completion names as
    #: `quarantined`, until `completed()` delivers their `PagesReleased`. Then the store may read and write pages of caches in
    #: host memory itself, without a copy of akv's.
    keeps_quarantined_pages: bool = False
    #: Whether kernels use window pages as scratch memory before the page table says that they are released.
    scratch_reuse_of_window_pages: bool = False
    #: The drafter beside the model, by what its KV depends on (P1): "none"; "mtp" and "eagle3", of one model with the target
    #: and in its KV cache, one token ahead; "vanilla_mtp", likewise, `draft_tokens` ahead; "hidden_state", without KV of its
    #: own. With one only the blocks of prompts are saved (S1): what was drafted and rejected must not be.
    drafter: str = "none"
    #: Tokens that the drafter proposes at a time. Needed for "vanilla_mtp", and used for nothing else.
    draft_tokens: int = 0
    #: Tokens at the end of a match that the drafter computes anew.
    recompute_tail_tokens: int = 0
    #: Ranks of each kind of parallelism that splits a sequence's layers or tokens.
    pipeline_parallel: int = 1
    context_parallel: int = 1
    decode_context_parallel: int = 1

    @property
    def lookahead(self) -> int:
        """L: prompt tokens behind a block that the drafter's KV in it depends on (K2)."""
        return self.draft_tokens if self.drafter == "vanilla_mtp" else _LOOKAHEADS.get(self.drafter, 0)


#: The drafters whose pages can be keyed, but for "vanilla_mtp", with how far each looks ahead (P1).
_LOOKAHEADS = {"none": 0, "mtp": 1, "eagle3": 1, "hidden_state": 0}
DEFAULT_CAPABILITIES = EngineCapabilities()


def check_capabilities(capabilities: EngineCapabilities, layout: Layout) -> None:
    """Refuse an engine that cannot serve this layout, naming the capability (P1, W9).

    Raises SettingsError (fault of the embedding engine): `capabilities.FIELD`, its value, and what it must be.
    """
    if not isinstance(capabilities, EngineCapabilities):
        raise SettingsError(
            "capabilities", type(capabilities).__name__, "it is no akv.EngineCapabilities", "Leave it out, or declare one."
        )
    _check_values(capabilities)
    _check_drafter(capabilities)
    if any(group.is_window for group in layout.groups):
        for name, served, why, fix in _WITH_WINDOWS:
            if (value := getattr(capabilities, name)) != served:
                raise SettingsError(f"capabilities.{name}", value, f"the layout has window groups, and {why}", fix)


_TOKENS_ARE_SPLIT = "a sequence that is split over ranks has no rank that holds a window's pages"
_UNSPLIT = "Use tensor or attention-data parallelism."

#: With window groups: the capability, the one answer that can be served, why no other can, and what to do.
_WITH_WINDOWS = (
    ("reservations", True, "destination pages of a load have to be kept out of use", "Serve this model without akv."),
    ("scratch_reuse_of_window_pages", False, "a page is overwritten before it can be saved", "Turn the reuse off."),
    (
        "recompute_tail_tokens",
        0,
        "a tail that is computed again reads window pages that were not loaded",
        "Use a drafter without one.",
    ),
    ("pipeline_parallel", 1, "its stages would have to agree on an end that none of them sees whole", _UNSPLIT),
    ("context_parallel", 1, _TOKENS_ARE_SPLIT, _UNSPLIT),
    ("decode_context_parallel", 1, _TOKENS_ARE_SPLIT, _UNSPLIT),
)


def _check_drafter(capabilities: EngineCapabilities) -> None:
    """A drafter writes into the target's pages: what its KV depends on must stand in their keys, or they are wrong pages."""
    served = [*_LOOKAHEADS, "vanilla_mtp"]
    if capabilities.drafter not in served:
        raise SettingsError(
            "capabilities.drafter",
            capabilities.drafter,
            "akv cannot tell on which tokens this drafter's KV depends, so it cannot name its pages",
            f"Use one of {', '.join(map(repr, served))}, or serve this model without akv.",
        )
    if capabilities.drafter == "vanilla_mtp" and not capabilities.draft_tokens:
        raise SettingsError(
            "capabilities.draft_tokens",
            capabilities.draft_tokens,
            "the KV of drafter 'vanilla_mtp' depends on as many tokens behind a block as it drafts, and that is not resolved",
            "Declare its draft length.",
        )


def _check_values(capabilities: EngineCapabilities) -> None:
    """A struct's constructor checks nothing, and a flag that is None or a number in quotes would pass for some answer."""
    for field in msgspec.structs.fields(capabilities):
        name, value, kind = f"capabilities.{field.name}", getattr(capabilities, field.name), field.type
        if type(value) is not kind:
            raise SettingsError(
                name, value, f"it is a {type(value).__name__}, not a {kind.__name__}", f"Use a {kind.__name__}."
            )
        # No tokens, and one rank: the defaults are the least.
        if kind is int and value < field.default:
            raise SettingsError(name, value, "there are no fewer tokens or ranks", f"Use {field.default} or more.")
