"""Whatever changes a page's bytes changes its key, and nothing else does (K3, K4, X2)."""

from typing import Any

import msgspec
import pytest

from akv.engines.sglang.names import PageKeys, PageShape, Ranks
from akv.errors import SettingsError
from akv.values.settings import Settings

SETTINGS = Settings(model_key="org/model")
SHAPE = PageShape(
    pool="kv",
    kind="Pool",
    layout="page_first",
    dtype="bf16",
    tokens=64,
    pieces=(512, 512),
    order=(0, 1),
    facts=(("heads", "8"),),
)


def keys(settings: Settings = SETTINGS, shape: PageShape = SHAPE, ranks: Ranks | None = None, **more: Any) -> PageKeys:
    return PageKeys(settings, shape, ranks or Ranks(), **{"replicated": False, **more})


def test_K3_a_key_names_namespace_engine_model_shard_pool_and_size() -> None:
    spaced, _, rest = keys().prefix.partition("~")
    fingerprint, _, rest = rest.partition("/")
    assert (spaced, rest) == ("akv1/sglang/org%2Fmodel", "w1r0/kv/t64b1024/")
    assert len(fingerprint) == 16
    assert keys().of(["ab12", "a/b"]) == [keys().prefix + "ab12", keys().prefix + "a%2Fb"]


@pytest.mark.parametrize(
    "change",
    [
        {"pool": "swa"},
        {"kind": "Other"},
        {"layout": "layer_first"},
        {"dtype": "fp8"},
        {"tokens": 32},
        {"pieces": (1024,)},
        {"pieces": (256, 768)},
        {"order": (1, 0)},
        {"facts": (("heads", "4"),)},
        {"access": "flat"},
    ],
)
def test_K4_servers_that_lay_pages_out_in_other_ways_have_other_keys(change: dict[str, Any]) -> None:
    assert keys(shape=msgspec.structs.replace(SHAPE, **change)).prefix != keys().prefix


@pytest.mark.parametrize(
    "change",
    [
        {"model_key": "other"},
        {"namespace": "other"},
        {"revision": "2"},
        {"integrity": "checksum"},
        {"integrity": "mac", "integrity_secret": "s"},
    ],
)
def test_K4_settings_that_change_what_is_stored_change_the_key(change: dict[str, Any]) -> None:
    assert keys(msgspec.structs.replace(SETTINGS, **change)).prefix != keys().prefix


def test_K4_whoever_pins_the_model_key_vouches_for_the_layout() -> None:
    pinned = keys(msgspec.structs.replace(SETTINGS, pin_model_key=True, revision="r/2"))
    assert pinned.prefix == "akv1/sglang/org%2Fmodel@r%2F2/w1r0/kv/t64b1024/"


@pytest.mark.parametrize(
    ("ranks", "replicated", "shard"),
    [
        (Ranks(tp_rank=3, tp_size=8), False, "w8r3"),
        (Ranks(tp_rank=3, tp_size=8), True, "replicated"),
        (Ranks(tp_rank=3, tp_size=8, pp_rank=1, pp_size=2), False, "w8r3-p2r1"),
        (Ranks(tp_rank=3, tp_size=8, pp_rank=1, pp_size=2), True, "replicated-p2r1"),
        (Ranks(cp_rank=2, cp_size=4), True, "replicated-c4r2"),
    ],
)
def test_K3_ranks_share_a_shard_only_where_they_hold_the_same_bytes(ranks: Ranks, replicated: bool, shard: str) -> None:
    assert f"/{shard}/kv/" in keys(ranks=ranks, replicated=replicated).prefix


def test_X2_with_a_secret_a_key_says_nothing_of_the_hash() -> None:
    secret, other = (keys(msgspec.structs.replace(SETTINGS, key_secret=text)) for text in ("one", "two"))
    (named,) = secret.of(["ab12"])
    assert "ab12" not in named
    assert named != other.of(["ab12"])[0]
    assert named == secret.of(["ab12"])[0]


def test_K4_a_model_needs_a_name() -> None:
    with pytest.raises(SettingsError, match="model_key"):
        keys(Settings(model_key=" "))
