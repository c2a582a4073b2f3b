"""What the two halves must agree on, compared once (D1)."""

from typing import Any

import msgspec
import pytest

from akv.errors import SettingsError
from akv.plan.keys import KeySpace, layout_fingerprint
from akv.plan.terms import check_terms, terms_of
from akv.values.layout import LayerGroup, Layout, Region
from akv.values.messages import MESSAGE_VERSION, Terms
from akv.values.settings import Settings

GROUP = LayerGroup(layers=(0,), dtype="bfloat16", kv_heads=2, head_size=8, regions=(Region(name="kv", bytes_per_page=64),))
LAYOUT = Layout(tokens_per_block=4, groups=(GROUP,), world=2)
SETTINGS = Settings(model_key="m", pool="embedded")
TERMS = terms_of(SETTINGS, LAYOUT, KeySpace.of(LAYOUT, "akv1", "m", rank=1), (10,))


def test_D1_a_half_says_what_must_be_alike() -> None:
    assert msgspec.to_builtins(TERMS) == {
        "version": MESSAGE_VERSION,
        "load_mode": "async",
        "role": "both",
        "layout": layout_fingerprint(LAYOUT),
        "key_space": f"akv1/m~{layout_fingerprint(LAYOUT)[:16]}",
        "world": 2,
        "lookahead": 0,
        "page_counts": (10,),
        "trailer": "",
    }


def test_D1_ranks_of_one_server_agree() -> None:
    other = terms_of(SETTINGS, LAYOUT, KeySpace.of(LAYOUT, "akv1", "m", rank=0), (10,))
    check_terms(TERMS, other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", MESSAGE_VERSION + 1),
        ("load_mode", "sync"),
        ("role", "consumer"),
        ("layout", "00" * 16),
        ("key_space", "akv1/other"),
        ("world", 4),
        ("lookahead", 1),
        ("page_counts", (11,)),
    ],
)
def test_D1_a_half_that_differs_is_refused_naming_both_values(field: str, value: Any) -> None:
    worker: Terms = msgspec.structs.replace(TERMS, **{field: value})
    with pytest.raises(SettingsError) as raised:
        check_terms(TERMS, worker)
    assert raised.value.field == f"terms.{field}"
    assert repr(getattr(TERMS, field)) in str(raised.value)
    assert repr(value) in str(raised.value)
