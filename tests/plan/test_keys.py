"""How pages are named: escaping, fingerprints, shards and whole keys (K3, K4, S10)."""

import re
import urllib.parse
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import SettingsError
from akv.plan.integrity import size_suffix
from akv.plan.keys import KeySpace, ServerKeys, Shard, escape, layout_fingerprint, model_part, shard_of
from akv.values.layout import LayerGroup, Layout, Region
from akv.values.settings import Settings

NAMES = st.text(min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
HASHES = st.lists(st.binary(min_size=16, max_size=16), max_size=4)


def group(kv_heads: int = 8, **changes: Any) -> LayerGroup:
    regions = (Region(name="layers.0.k", bytes_per_page=2048), Region(name="layers.0.v", bytes_per_page=1024))
    fields: dict[str, Any] = {"layers": (0,), "dtype": "bfloat16", "kv_heads": kv_heads, "head_size": 64, "regions": regions}
    return LayerGroup(**(fields | changes))


def layout(*groups: LayerGroup, tokens_per_block: int = 32, world: int = 1) -> Layout:
    return Layout(tokens_per_block=tokens_per_block, groups=groups or (group(),), world=world)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("", ""),
        ("Llama-3.1_8B", "Llama-3.1_8B"),
        ("meta-llama/Llama", "meta-llama%2FLlama"),
        ("a~b@c%d e", "a%7Eb%40c%25d%20e"),
        ("\u00e9\u6f22", "%C3%A9%E6%BC%A2"),
        ("\n\x00", "%0A%00"),
    ],
)
def test_K4_escape_encodes_every_byte_outside_its_alphabet_in_upper_case_hex(text: str, escaped: str) -> None:
    assert escape(text) == escaped


@given(st.text())
def test_K4_escape_is_injective_and_stays_in_its_alphabet(text: str) -> None:
    escaped = escape(text)
    assert re.fullmatch(r"[A-Za-z0-9._%-]*", escaped)
    assert urllib.parse.unquote(escaped, errors="strict") == text


def test_K4_the_fingerprint_of_one_layout_is_fixed() -> None:
    """A change here renames every key: bump nothing, but know that pools start empty for the new version."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout())) == {
        "tokens_per_block": 32,
        "groups": [
            {
                "layers": [0],
                "attention": "full",
                "window_tokens": 0,
                "sink_tokens": 0,
                "dtype": "bfloat16",
                "kv_heads": 8,
                "head_size": 64,
                "regions": [
                    {"name": "layers.0.k", "bytes_per_page": 2048},
                    {"name": "layers.0.v", "bytes_per_page": 1024},
                ],
                "quantisation": "",
                "order": "heads,tokens,head_size",
            }
        ],
        "world": 1,
    }
    assert layout_fingerprint(layout()) == "041f254c8649a49e914200a75975413b"


VARIANTS = {
    "base": layout(),
    "tokens_per_block": layout(tokens_per_block=64),
    "world": layout(world=2),
    "two groups": layout(group(), group()),
    "layers": layout(group(layers=(1,))),
    "window": layout(group(attention="sliding_window", window_tokens=64)),
    "wider window": layout(group(attention="sliding_window", window_tokens=65)),
    "sinks": layout(group(attention="sliding_window", window_tokens=64, sink_tokens=1)),
    "dtype": layout(group(dtype="float16")),
    "kv_heads": layout(group(kv_heads=4)),
    "head_size": layout(group(head_size=128)),
    "quantisation": layout(group(quantisation="fp8-per-tensor")),
    "order": layout(group(order="tokens,heads,head_size")),
    "region size": layout(group(regions=(Region(name="layers.0.k", bytes_per_page=3072),))),
    "region order": layout(group(regions=tuple(reversed(group().regions)))),
}


def test_K4_whatever_changes_a_page_changes_the_fingerprint_and_every_key() -> None:
    assert len({layout_fingerprint(variant) for variant in VARIANTS.values()}) == len(VARIANTS)
    spaces = [KeySpace.of(variant, "akv1", "model") for variant in VARIANTS.values()]
    assert len({space.prefix(0) for space in spaces}) == len(VARIANTS)
    assert len({KeySpace.of(layout(), "akv1", "model", revision).prefix(0) for revision in ("", "r1", "r2")}) == 3


@pytest.mark.parametrize(
    ("pin", "revision", "part"),
    [
        (False, "", "org%2Fm~0123456789abcdef"),
        (True, "", "org%2Fm"),
        (False, "v/2", "org%2Fm~0123456789abcdef@v%2F2"),
        (True, "v/2", "org%2Fm@v%2F2"),
    ],
)
def test_K4_model_part(pin: bool, revision: str, part: str) -> None:
    fingerprint = layout_fingerprint(layout())
    assert model_part("org/m", layout(), pin=pin, revision=revision) == part.replace("0123456789abcdef", fingerprint[:16])


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("model_key", ""),
        ("model_key", " \t"),
        ("model_key", "\udc80"),
        ("namespace", ""),
        ("namespace", "\ud800"),
        ("revision", " "),
        ("revision", "\udfff"),
    ],
)
def test_K4_a_part_that_is_blank_or_no_unicode_is_refused_by_field(field: str, text: str) -> None:
    parts = {"namespace": "akv1", "model_key": "model", "revision": ""} | {field: text}
    with pytest.raises(SettingsError) as raised:
        KeySpace.of(layout(), parts["namespace"], parts["model_key"], parts["revision"])
    assert (raised.value.field, raised.value.value) == (field, text)
    assert raised.value.__suppress_context__ or "empty" in str(raised.value)


@pytest.mark.parametrize(
    ("kv_heads", "world", "shards"),
    [
        (8, 1, ["w1r0!"]),
        (1, 1, ["w1r0!"]),
        (8, 2, ["w2r0!", "w2r1!"]),
        (4, 4, ["w4r0!", "w4r1!", "w4r2!", "w4r3!"]),
        (1, 4, ["replicated!", "replicated", "replicated", "replicated"]),
        (2, 4, ["w2r0!", "w2r0", "w2r1!", "w2r1"]),
        (2, 8, ["w2r0!", "w2r0", "w2r0", "w2r0", "w2r1!", "w2r1", "w2r1", "w2r1"]),
    ],
)
def test_K3_shards(kv_heads: int, world: int, shards: list[str]) -> None:
    """An exclamation mark: this rank writes it."""
    of = layout(group(kv_heads=kv_heads), world=world)
    assert [shard_of(of, 0, rank) for rank in range(world)] == [Shard(name.rstrip("!"), name[-1] == "!") for name in shards]


@pytest.mark.parametrize("rank", [-1, 4])
def test_K3_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of a layout of 4"):
        shard_of(layout(world=4), 0, rank)


@given(st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_K3_ranks_share_a_shard_exactly_if_they_hold_the_same_heads_and_one_of_them_writes(
    fewer: int, factor: int, more_heads: bool
) -> None:
    kv_heads, world = (fewer * factor, fewer) if more_heads else (fewer, fewer * factor)
    of = layout(group(kv_heads=kv_heads), world=world)
    # Head by head: query heads are spread evenly, and a rank holds the KV heads that its query heads attend to.
    query_heads = kv_heads * world
    held = [
        {query * kv_heads // query_heads for query in range(query_heads) if query * world // query_heads == rank}
        for rank in range(world)
    ]
    shards = [shard_of(of, 0, rank) for rank in range(world)]
    for left in range(world):
        for right in range(world):
            assert (shards[left].name == shards[right].name) == (held[left] == held[right])
    for name in {shard.name for shard in shards}:
        holders = [rank for rank in range(world) if shards[rank].name == name]
        assert [rank for rank in holders if shards[rank].writes] == [min(holders)]


def test_K3_a_key_is_spelt_out() -> None:
    of = layout(group(kv_heads=4), group(kv_heads=1, regions=(Region(name="latent", bytes_per_page=99),)), world=4)
    space = KeySpace.of(of, "team a", "org/m", "r1", pin_model_key=True, rank=2)
    block = bytes(range(0xF0, 0x100))
    assert space.space == "team%20a/org%2Fm@r1"
    assert space.keys(0, [block]) == ["team%20a/org%2Fm@r1/w4r2/lg0/t32b3072/f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"]
    assert space.keys(1, [block]) == ["team%20a/org%2Fm@r1/replicated/lg1/t32b99/f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"]
    assert (space.writes(0), space.writes(1)) == (True, False)
    assert space.eviction_group(block) == "team%20a/org%2Fm@r1/w4/f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"


@given(NAMES, NAMES, st.one_of(st.just(""), NAMES), st.booleans(), HASHES, st.integers(0, 1), st.integers(0, 3))
def test_K3_keys_parse_back_into_their_parts(
    namespace: str, model_key: str, revision: str, pin: bool, hashes: list[bytes], index: int, rank: int
) -> None:
    of = layout(group(kv_heads=2), group(kv_heads=1), world=4)
    space = KeySpace.of(of, namespace, model_key, revision, pin, rank)
    keys = space.keys(index, hashes)
    assert len(keys) == len(hashes)
    for key, block in zip(keys, hashes, strict=True):
        part = re.fullmatch(
            r"([^/]+)/([^/~@]+)(?:~([0-9a-f]{16}))?(?:@([^/~@]+))?/(w2r[01]|replicated)/lg(\d)/t32b3072/([0-9a-f]{32})", key
        )
        assert part is not None
        found_namespace, found_model, fingerprint, found_revision, shard, found_index, found_hash = part.groups()
        assert urllib.parse.unquote(found_namespace, errors="strict") == namespace
        assert urllib.parse.unquote(found_model, errors="strict") == model_key
        assert fingerprint == (None if pin else layout_fingerprint(of)[:16])
        assert urllib.parse.unquote(found_revision or "", errors="strict") == revision
        assert shard == shard_of(of, index, rank).name
        assert int(found_index) == index
        assert bytes.fromhex(found_hash) == block
        assert key.startswith(space.prefix(index))
        assert key.startswith(space.space + "/")


def test_K3_an_owner_alone_shares_its_keys_with_a_single_rank_server() -> None:
    assert KeySpace.of(layout(), "akv1", "m").prefix(0) == KeySpace.of(layout(world=1), "akv1", "m", rank=0).prefix(0)
    assert "/w1r0/" in KeySpace.of(layout(), "akv1", "m").prefix(0)


def test_K1_trtllm_spells_parts_as_they_are_and_refuses_those_with_separators() -> None:
    space = KeySpace.of(layout(), "team a", "Llama%3", "v 2", True, key_format="trtllm")
    assert space.keys(0, [bytes(16)]) == ["team a/Llama%3@v 2/w1r0/lg0/t32b3072/" + "00" * 16]
    for field in ("namespace", "model_key", "revision"):
        for separator in "/~@":
            parts: dict[str, Any] = {"namespace": "n", "model_key": "m", "revision": ""} | {field: f"a{separator}b"}
            with pytest.raises(SettingsError, match="trtllm") as raised:
                KeySpace.of(layout(), **parts, pin_model_key=True, key_format="trtllm")
            assert raised.value.field == field


def test_S11_the_size_part_tells_kinds_of_trailers_and_secrets_apart() -> None:
    spaces = [
        KeySpace.of(layout(), "akv1", "m", pin_model_key=True, trailer=size_suffix(kind, secret))
        for kind, secret in (("off", b""), ("checksum", b""), ("mac", b"a"), ("mac", b"b"))
    ]
    of_settings = Settings(model_key="m", pin_model_key=True, integrity="mac", integrity_secret="b")
    assert KeySpace.of_settings(of_settings, layout()).prefix(0) == spaces[3].prefix(0)
    # blake2b's own digest, of 64 bytes, as `b2sum` prints it.
    assert [space.prefix(0) for space in spaces] == [
        "akv1/m/w1r0/lg0/t32b3072/",
        "akv1/m/w1r0/lg0/t32b3072-c/",
        "akv1/m/w1r0/lg0/t32b3072-m333fcb4e/",
        "akv1/m/w1r0/lg0/t32b3072-mc029c24b/",
    ]


def test_K8_a_reset_changes_the_revision_and_nothing_else() -> None:
    settings = Settings(model_key="m", pin_model_key=True, revision="r1")
    assert KeySpace.of_settings(settings, layout()).space == "akv1/m@r1"
    assert KeySpace.of_settings(settings, layout(), revision="r2").space == "akv1/m@r2"
    assert KeySpace.of_settings(settings, layout(world=2), rank=1).prefix(0) == "akv1/m@r1/w2r1/lg0/t32b3072/"


@pytest.mark.parametrize(
    ("world", "kv_heads", "shards"),
    [
        (1, 8, ["w1r0"]),
        (2, 8, ["w2r0", "w2r1"]),
        (4, 2, ["w2r0", "w2r1"]),
        (4, 1, ["replicated"]),
    ],
)
def test_L2_a_server_asks_for_every_distinct_shard_of_a_page_once(world: int, kv_heads: int, shards: list[str]) -> None:
    settings, split = Settings(model_key="m"), layout(group(kv_heads), group(8), world=world)
    asked = ServerKeys.of_settings(settings, split)
    hashes = [b"a" * 16, b"b" * 16]
    ranks = [KeySpace.of_settings(settings, split, rank=rank) for rank in range(world)]
    assert asked.space == ranks[0].space
    assert [asked.shards(0), asked.shards(1)] == [len(shards), min(world, 8)]
    keys = asked.keys(0, hashes)
    assert [key.split("/")[2] for key in keys] == shards * 2
    assert [key.rpartition("/")[2] for key in keys] == [block.hex() for block in hashes for _ in shards]
    assert set(keys) == {key for rank in ranks for key in rank.keys(0, hashes)}


def test_K8_a_server_asks_under_the_revision_that_a_reset_names() -> None:
    settings = Settings(model_key="m", revision="one")
    assert ServerKeys.of_settings(settings, layout(world=2), revision="two").space.endswith("@two")
