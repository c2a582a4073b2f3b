"""Which engines cannot serve a model with sliding windows, and by which name they are refused (W9)."""

from typing import Any

import msgspec
import pytest

from akv.errors import SettingsError
from akv.values.capabilities import DEFAULT_CAPABILITIES, EngineCapabilities, check_capabilities
from akv.values.layout import LayerGroup, Layout, Region, check_layout

FULL = LayerGroup(layers=(0,), dtype="bfloat16", kv_heads=4, head_size=64, regions=(Region(name="k", bytes_per_page=100),))
WINDOW = msgspec.structs.replace(FULL, layers=(1,), attention="sliding_window", window_tokens=64)
FULL_ATTENTION = Layout(tokens_per_block=32, groups=(FULL,))
#: The window group comes last: one is enough.
WINDOWS = Layout(tokens_per_block=32, groups=(FULL, WINDOW))
#: What no engine may declare with a window group.
REFUSED = [
    ("reservations", False),
    ("scratch_reuse_of_window_pages", True),
    ("recompute_tail_tokens", 1),
    ("pipeline_parallel", 2),
    ("context_parallel", 2),
    ("decode_context_parallel", 2),
]


def refusal(capabilities: Any, layout: Layout) -> SettingsError:
    with pytest.raises(SettingsError) as raised:
        check_capabilities(capabilities, layout)
    assert raised.value.fix
    assert raised.value.fix in str(raised.value)
    return raised.value


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_W9_an_engine_that_cannot_keep_windows_is_refused_by_capability(field: str, value: Any) -> None:
    error = refusal(EngineCapabilities(**{field: value}), WINDOWS)
    assert (error.field, error.value) == (f"capabilities.{field}", value)
    assert "window groups" in str(error)


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_W9_full_attention_alone_does_not_need_it(field: str, value: Any) -> None:
    check_capabilities(EngineCapabilities(**{field: value}), FULL_ATTENTION)


@pytest.mark.parametrize("layout", [FULL_ATTENTION, WINDOWS])
@pytest.mark.parametrize(
    "capabilities",
    [DEFAULT_CAPABILITIES, EngineCapabilities(window_retention_tokens=1024), EngineCapabilities(keeps_quarantined_pages=True)],
)
def test_W9_an_engine_that_declares_nothing_or_more_serves_both(capabilities: EngineCapabilities, layout: Layout) -> None:
    check_layout(layout)
    check_capabilities(capabilities, layout)


def test_W9_every_capability_is_either_refused_with_windows_or_served() -> None:
    """A new one has to be put on one of the lists above."""
    names = {field.name for field in msgspec.structs.fields(EngineCapabilities)}
    assert names == {field for field, _ in REFUSED} | {
        "window_retention_tokens",
        "keeps_quarantined_pages",
        "drafter",
        "draft_tokens",
    }


@pytest.mark.parametrize("layout", [FULL_ATTENTION, WINDOWS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_retention_tokens", -1),
        ("window_retention_tokens", 1.5),
        ("window_retention_tokens", "1024"),
        ("window_retention_tokens", True),
        ("recompute_tail_tokens", -1),
        ("recompute_tail_tokens", None),
        ("pipeline_parallel", 0),
        ("context_parallel", 0),
        ("decode_context_parallel", 0),
        ("decode_context_parallel", "1"),
        ("reservations", None),
        ("reservations", 0),
        ("scratch_reuse_of_window_pages", 1),
        ("keeps_quarantined_pages", "no"),
        ("drafter", None),
        ("drafter", "eagle"),
        ("drafter", "ngram"),
        ("draft_tokens", -1),
        ("draft_tokens", 1.0),
    ],
)
def test_W9_what_is_no_answer_is_refused_with_every_layout(field: str, value: Any, layout: Layout) -> None:
    error = refusal(EngineCapabilities(**{field: value}), layout)
    assert (error.field, error.value) == (f"capabilities.{field}", value)


@pytest.mark.parametrize("capabilities", [None, {"reservations": True}, EngineCapabilities])
def test_W9_capabilities_are_a_struct(capabilities: Any) -> None:
    error = refusal(capabilities, FULL_ATTENTION)
    assert (error.field, error.value) == ("capabilities", type(capabilities).__name__)


@pytest.mark.parametrize(
    ("drafter", "draft_tokens", "lookahead"),
    [("none", 0, 0), ("none", 3, 0), ("mtp", 3, 1), ("eagle3", 0, 1), ("vanilla_mtp", 3, 3), ("hidden_state", 3, 0)],
)
def test_P1_drafters_that_can_be_keyed_and_how_far_they_look_ahead(drafter: str, draft_tokens: int, lookahead: int) -> None:
    capabilities = EngineCapabilities(drafter=drafter, draft_tokens=draft_tokens)
    check_capabilities(capabilities, WINDOWS)
    assert capabilities.lookahead == lookahead


@pytest.mark.parametrize("drafter", ["", "eagle", "EAGLE3", "two_model", "medusa", "draft_model"])
def test_P1_any_other_drafter_is_refused_by_name(drafter: str) -> None:
    error = refusal(EngineCapabilities(drafter=drafter), FULL_ATTENTION)
    assert (error.field, error.value) == ("capabilities.drafter", drafter)
    assert "'eagle3'" in error.fix


def test_P1_a_draft_length_that_is_not_resolved_is_refused() -> None:
    error = refusal(EngineCapabilities(drafter="vanilla_mtp"), FULL_ATTENTION)
    assert (error.field, error.value) == ("capabilities.draft_tokens", 0)
