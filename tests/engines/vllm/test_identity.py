"""What separates vLLM's requests from each other, in akv's terms (K1, K5, L7)."""

from types import SimpleNamespace
from typing import Any

import pytest

from akv.engines.vllm.identity import scope_of, use_of
from akv.values.scope import EMPTY_SCOPE
from akv_testing.vllm_objects import VllmRequest


def request(**fields: Any) -> VllmRequest:
    return VllmRequest("r", range(40), 1, **fields)


def adapter(name: str, path: str, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number)


def feature(offset: int, length: int, identifier: str | None = "hash") -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_K1_a_plain_request_has_the_scope_of_a_server_with_one_tenant() -> None:
    assert scope_of(request()) == EMPTY_SCOPE
    assert scope_of(request(cache_salt="")) == EMPTY_SCOPE


def test_K1_salts_separate() -> None:
    assert scope_of(request(cache_salt="s")).salt == "s"


def test_K8_X3_an_epoch_separates_and_stands_for_no_salt() -> None:
    tenants = [scope_of(request(cache_salt=salt), epoch).salt for salt in (None, "s") for epoch in ("", "1", "2")]
    assert len(set(tenants)) == 6
    assert scope_of(request(), "1", require_salt=True).salt is None
    assert scope_of(request(cache_salt="s"), "1", require_salt=True).salt == tenants[4]


def test_K1_an_adapter_is_its_name_and_path_and_not_this_servers_number() -> None:
    one = scope_of(request(lora_request=adapter("a", "/x", 1))).lora
    assert one is not None
    assert -(2**63) <= one.id < 2**63
    assert scope_of(request(lora_request=adapter("a", "/x", 2))).lora == one
    for other in (adapter("b", "/x"), adapter("a", "/y"), adapter("a/", "x"), adapter("a\0/x", "")):
        assert scope_of(request(lora_request=other)).lora != one


def test_K1_media_are_their_identifier_and_place() -> None:
    media = scope_of(request(mm_features=[feature(20, 4, "late"), feature(2, 8, "early")])).media
    assert media is not None
    assert [(item.position, item.tokens) for item in media] == [(2, 8), (20, 4)]
    assert len({item.digest for item in media}) == 2
    assert {len(item.digest) for item in media} == {32}


@pytest.mark.parametrize(
    "features", [[feature(2, 8, None)], [feature(2, 8), feature(9, 2)], [feature(2, 0)]], ids=["unnamed", "overlap", "empty"]
)
def test_K5_media_that_cannot_be_named_share_nothing(features: list[Any]) -> None:
    assert scope_of(request(mm_features=features)).media is None


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, (True, True)),
        ({"prompt_token_ids": None}, (False, False)),
        ({"prompt_embeds": object()}, (False, False)),
        ({"prompt_is_token_ids": [True]}, (False, False)),
        ({"resumable": True}, (False, False)),
        ({"skip_reading_prefix_cache": True}, (False, True)),
        ({"kv_transfer_params": {"akv.do_not_read": True}}, (False, True)),
        ({"kv_transfer_params": {"akv.do_not_save": True}}, (True, False)),
        ({"kv_transfer_params": {"do_remote_prefill": False}}, (True, True)),
    ],
)
def test_L7_who_loads_and_who_is_saved(fields: dict[str, Any], use: tuple[bool, bool]) -> None:
    assert use_of(request(**fields)) == use
