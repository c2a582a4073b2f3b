"""Who shares pages with whom, told from TensorRT-LLM's requests (K1, K2, K5), and how its cache becomes akv's layout (K4)."""

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from akv import SettingsError
from akv.engines.tensorrt_llm.identity import digest, scope_of
from akv.engines.tensorrt_llm.layout import Rows, describe
from akv.plan.hashing import scope_seed
from akv.values.layout import check_layout
from akv.values.scope import EMPTY_SCOPE, Lora, Scope
from akv_testing import FakeStore
from akv_testing.engines.tensorrt_llm import GroupShape, StandInCache, StandInRequest, StandInServer, llm_args

Serve = Callable[..., StandInServer]
PROMPT = list(range(200))
PICTURE = list(range(8))
OTHER = [-1, *range(7)]


def with_picture(number: int, picture: list[int] | None) -> StandInRequest:
    """A picture at tokens 70 to 90."""
    tokens = [*PROMPT[:70], *[9] * 20, *PROMPT[90:]]
    hashes = None if picture is None else [picture]
    return StandInRequest(number, tokens, multimodal_hashes=hashes, multimodal_positions=[70], multimodal_lengths=[20])


@pytest.mark.parametrize(
    ("first", "second", "tokens"),
    [
        (StandInRequest(1, PROMPT), StandInRequest(1, PROMPT), 192),
        (StandInRequest(1, PROMPT), StandInRequest(1, PROMPT, cache_salt=""), 192),
        (StandInRequest(1, PROMPT), StandInRequest(1, PROMPT, cache_salt="a"), 0),
        (StandInRequest(1, PROMPT, cache_salt="a"), StandInRequest(1, PROMPT, cache_salt="a"), 192),
        (StandInRequest(1, PROMPT, cache_salt="a"), StandInRequest(1, PROMPT, cache_salt="b"), 0),
        (StandInRequest(1, PROMPT), StandInRequest(1, PROMPT, lora_task_id=0), 0),
        (StandInRequest(1, PROMPT, lora_task_id=3), StandInRequest(1, PROMPT, lora_task_id=3), 192),
        (with_picture(1, PICTURE), with_picture(1, PICTURE), 192),
        (with_picture(1, PICTURE), with_picture(1, OTHER), 64),
        (with_picture(1, PICTURE), with_picture(1, None), 0),
        (with_picture(1, None), with_picture(1, PICTURE), 0),
    ],
)
def test_K1_requests_share_exactly_what_their_KV_shares(
    serve: Serve, first: StandInRequest, second: StandInRequest, tokens: int
) -> None:
    one = serve()
    # Parameters are made once for both backends.
    one.engine.serve(StandInRequest(**initial(first)))
    assert one.left_behind() == []
    other = serve()
    other.engine.serve(StandInRequest(**initial(second)))
    assert other.engine.answers[0][1] == tokens
    assert other.left_behind() == []


def initial(request: StandInRequest) -> dict[str, Any]:
    names = (
        "request_id",
        "prompt",
        "cache_salt",
        "lora_task_id",
        *(f"multimodal_{n}" for n in ("hashes", "positions", "lengths")),
    )
    return {name: getattr(request, name) for name in names}


@pytest.mark.parametrize(
    ("fields", "scope"),
    [
        ({}, EMPTY_SCOPE),
        ({"cache_salt": None, "cache_salt_id": None}, EMPTY_SCOPE),
        ({"cache_salt": "t", "cache_salt_id": 9}, Scope(salt="t")),
        ({"cache_salt_id": 9}, Scope(salt="9")),
        ({"lora_task_id": 5, "lora_weights": object()}, Scope(lora=Lora(5))),
        ({"lora_weights": object()}, Scope(media=None)),
        ({"py_multimodal_data": {}}, Scope(media=None)),
        ({"prompt_embedding_table": object()}, Scope(media=None)),
        ({"multimodal_positions": [3], "multimodal_lengths": [1]}, Scope(media=None)),
        ({"multimodal_hashes": [[1] * 8], "multimodal_positions": [3], "multimodal_lengths": []}, Scope(media=None)),
        ({"multimodal_hashes": [[1] * 7], "multimodal_positions": [3], "multimodal_lengths": [1]}, Scope(media=None)),
    ],
)
def test_K5_what_no_digest_names_leaves_a_request_alone(fields: dict[str, Any], scope: Scope) -> None:
    assert scope_of(SimpleNamespace(**fields)) == scope


@pytest.mark.parametrize("beside", ["prompt_embedding_table", "encoder_tokens", "input_token_extra_ids", "lora_weights"])
def test_K5_digests_of_media_name_nothing_that_stands_beside_them(beside: str) -> None:
    media: dict[str, Any] = {"multimodal_hashes": [[1] * 8], "multimodal_positions": [3], "multimodal_lengths": [1]}
    known = scope_of(SimpleNamespace(**media, multimodal_embedding=object(), py_multimodal_data={"image": object()}))
    assert known.media is not None
    assert len(known.media) == 1
    assert scope_of(SimpleNamespace(**media, **{beside: object()})) == Scope(media=None)


def test_K1_a_digest_is_eight_int32_each_big_endian() -> None:
    numbers = struct.unpack(">8i", bytes(range(200, 232)))
    assert digest(numbers) == bytes(range(200, 232))
    assert min(numbers) < 0
    item = scope_of(
        SimpleNamespace(
            multimodal_hashes=[list(struct.unpack(">8i", bytes(range(32))))], multimodal_positions=[0], multimodal_lengths=[2]
        )
    )
    assert item.media is not None
    assert scope_seed(Scope(), media=item.media).hex() == "4e06125d41118be323fb127bce23b68e"


def test_K6_a_request_that_cannot_be_hashed_is_computed_without_a_cache(serve: Serve, store: FakeStore) -> None:
    server = serve()
    server.engine.serve(
        StandInRequest(1, PROMPT, multimodal_hashes=[PICTURE], multimodal_positions=[190], multimodal_lengths=[20]),
        StandInRequest(2, list(range(40))),
    )
    assert len(store.keys()) == 1
    assert server.engine.computed_tokens == {1: 200, 2: 40}
    assert server.left_behind() == []


@pytest.mark.parametrize(("kind", "lookahead"), [("eagle3", 1), ("MTP", 1), ("vanilla", 3)])
def test_K2_beside_a_drafter_prompts_are_shared_and_drafts_are_not_saved(
    serve: Serve, store: FakeStore, kind: str, lookahead: int
) -> None:
    config = SimpleNamespace(
        decoding_type="MTP" if kind == "vanilla" else kind, use_mtp_vanilla=kind == "vanilla", num_nextn_predict_layers=3
    )
    drafting = {"args": llm_args(speculative_config=config), "lookahead": lookahead, "drafts": 3}
    first = serve(**drafting)
    first.engine.serve(StandInRequest(1, list(range(128)), max_new_tokens=80))
    # The last block of the prompt has no lookahead, and what was generated is not saved (S1).
    assert len(store.keys()) == 3
    assert first.left_behind() == []
    other = serve(**drafting)
    other.engine.serve(StandInRequest(1, [*range(127), 5, 6, 7]), StandInRequest(2, [*range(96), 5, 6]))
    assert other.engine.answers == [(1, 96, 96), (2, 64, 64)]
    assert other.left_behind() == []


def test_K4_a_cache_is_described_by_what_changes_its_bytes() -> None:
    cache = StandInCache([GroupShape(), GroupShape(100, 4)], tokens_per_block=32, pages=8)
    described = describe(cache.layout(), llm_args())
    check_layout(described.layout)
    full, window = described.layout.groups
    assert (full.attention, window.attention, window.window_tokens, window.sink_tokens) == ("full", "sliding_window", 100, 4)
    assert [region.name for region in window.regions] == ["1.key", "1.value"]
    assert full.bytes_per_page == cache.page_bytes
    first = cache.layout().groups[0].regions[0]
    assert described.rows[0][0] == Rows(first.base, first.size, first.stride, 8)
    assert described.tables([[1], [2, -1]]) == [[1], [2, -1]]
    assert described.tables([[1]]) == [[1], []]
    assert describe(StandInCache([GroupShape()], tokens_per_block=32, pages=8).layout(), llm_args()).tables((), [3]) == [[3]]
    layouts = [
        described.layout,
        describe(cache.layout(), llm_args(attn_backend="FLASHINFER")).layout,
        describe(cache.layout(), llm_args(quant_config=SimpleNamespace(kv_cache_quant_algo="FP8"))).layout,
        describe(SimpleNamespace(**{**vars(cache.layout()), "dtype": "fp8"}), llm_args()).layout,
    ]
    assert len(set(layouts)) == 4


@pytest.mark.parametrize("named", ["sink_tokens", "num_sink_tokens", "sinks", "config"])
def test_sinks_are_found_by_any_name_they_have_had(named: str) -> None:
    cache = StandInCache([GroupShape(100, 4)], tokens_per_block=32, pages=8)
    group = vars(cache.layout().groups[0]).copy()
    del group["sink_tokens"]
    if named != "config":
        group[named] = 6
    layout = SimpleNamespace(**{**vars(cache.layout()), "groups": (SimpleNamespace(**group),)})
    args = llm_args(kv_cache_config=SimpleNamespace(dtype="auto", sink_token_length=6 if named == "config" else None))
    assert describe(layout, args).layout.groups[0].sink_tokens == 6


def test_replicated_regions_are_a_part_of_the_page() -> None:
    cache = StandInCache([GroupShape()], tokens_per_block=32, pages=8)
    key, value = cache.layout().groups[0].regions
    group = SimpleNamespace(**{**vars(cache.layout().groups[0]), "regions": (key,), "replicated_regions": (value,)})
    layout = SimpleNamespace(**{**vars(cache.layout()), "groups": (group,)})
    assert describe(layout, llm_args()).layout.groups[0].bytes_per_page == cache.page_bytes


def test_a_cache_without_groups_is_refused() -> None:
    with pytest.raises(SettingsError, match="layout.groups"):
        describe(SimpleNamespace(tokens_per_block=32, groups=()), llm_args())
