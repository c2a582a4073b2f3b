"""What a chain begins on and what its blocks cover: scopes, media, lookahead, secrets (K1, K2, K5, X2)."""

import enum
import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import SettingsError, TokenError
from akv.plan.hashing import scope_seed, whole_blocks
from akv.plan.identity import Hashing
from akv.plan.tokens import PLACEHOLDER
from akv.values.scope import EMPTY_SCOPE, Lora, Media, Scope

#: Bytes of a digest that differ per content.
CATS, DOGS = bytes(range(32)), bytes(range(32, 64))


def image(position: int, tokens: int = 1, digest: bytes = CATS) -> Media:
    return Media(digest=digest, position=position, tokens=tokens)


def hashes(hashing: Hashing, scope: Scope, tokens: list[int]) -> list[bytes]:
    chain = hashing.chain(scope, tokens)
    return chain.hashes(0, chain.hashable_blocks)


def naive(hashing: Hashing, scope: Scope, tokens: list[int]) -> list[bytes]:
    """K1 and K2, word for word."""

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=hashing.secret).digest()

    def frame(data: bytes) -> bytes:
        return struct.pack("<I", len(data)) + data

    trtllm = hashing.key_format == "trtllm"
    media = scope.media or ()
    lora = b"" if scope.lora is None else struct.pack("<q", scope.lora.id) + scope.lora.revision.encode()
    seed = digest(frame((scope.salt or "").encode()) + frame(lora) + b"".join(frame(m.digest) for m in media if trtllm))
    size, ahead = hashing.tokens_per_block, hashing.lookahead
    if ahead:
        seed = digest(seed + b"prompt-lookahead" + struct.pack("<q", ahead))
    result: list[bytes] = []
    left = [] if trtllm else list(media)
    while (len(result) + 1) * size + ahead <= len(tokens):
        begin, end = len(result) * size, (len(result) + 1) * size + ahead
        data = result[-1] if result else seed
        data += b"".join(struct.pack("<q", token) for token in tokens[begin:end])
        for item in [item for item in left if item.position < end]:
            data += frame(item.digest + struct.pack("<qq", item.position, item.tokens))
            left.remove(item)
        result.append(digest(data))
    return result


@pytest.mark.parametrize(
    ("hashing", "scope", "seed"),
    [
        (Hashing(4), EMPTY_SCOPE, "c804ce198ec337e3dc762bdd1a09aece"),
        (Hashing(4), Scope(salt="tenant-a"), "1c3d1880c5954bdcaa8fe0d8866c4700"),
        (Hashing(4), Scope(lora=Lora(7)), "1ff984d2d14c6c50b0ce4d2b0c729619"),
        (Hashing(4, key_format="trtllm"), Scope(media=(image(0),)), "4e06125d41118be323fb127bce23b68e"),
        (Hashing(4, key_format="trtllm"), Scope(lora=Lora(7)), "1ff984d2d14c6c50b0ce4d2b0c729619"),
        # Media are no part of the seed where they count in the blocks.
        (Hashing(4), Scope(media=(image(0),)), "c804ce198ec337e3dc762bdd1a09aece"),
    ],
)
def test_K1_vectors_of_seeds(hashing: Hashing, scope: Scope, seed: str) -> None:
    assert hashing.seed(scope).hex() == seed


def test_K2_vectors_of_a_chain_with_lookahead() -> None:
    with_lookahead = hashes(Hashing(4, lookahead=1), EMPTY_SCOPE, list(range(9)))
    assert [block.hex() for block in with_lookahead] == [
        "cc9889c0ebadd9c7711553b72d3dfcc0",
        "57176e336dde3396121f344c6b1855f6",
    ]
    without = hashes(Hashing(4), EMPTY_SCOPE, list(range(9)))
    assert [block.hex() for block in without] == ["2cbd989e68a1d62fe8bebc04262e3dd9", "2a4fd6d9610279f6733a044d56664a9d"]


@pytest.mark.parametrize(
    ("tokens", "lookahead", "blocks"),
    [(8, 0, 2), (8, 1, 1), (9, 1, 2), (4, 1, 0), (5, 1, 1), (3, 7, 0), (11, 3, 2), (10, 3, 1)],
)
def test_K2_a_block_exists_once_its_lookahead_does(tokens: int, lookahead: int, blocks: int) -> None:
    assert whole_blocks(tokens, 4, lookahead) == blocks
    chain = Hashing(4, lookahead=lookahead).chain(EMPTY_SCOPE, range(tokens))
    assert chain.hashable_blocks == blocks
    with pytest.raises(ValueError, match=f"{blocks + 1} blocks asked"):
        chain.hash_up_to(blocks + 1)


def test_K2_K6_a_placeholder_is_no_lookahead_and_the_token_that_replaces_it_is() -> None:
    hashing = Hashing(4, lookahead=1)
    chain = hashing.chain(EMPTY_SCOPE, [0, 1, 2, 3, PLACEHOLDER, PLACEHOLDER])
    assert chain.hashable_blocks == 0
    chain.append([4])
    assert chain.hashable_blocks == 1
    chain.append([5, 6, 7, 8])
    assert chain.hashes(0, 2) == hashes(hashing, EMPTY_SCOPE, list(range(9)))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], Scope]:
    """A prompt with media in it."""
    tokens = draw(st.lists(st.integers(0, 2), max_size=24))
    media, at = [], 0
    while (at := at + draw(st.integers(0, 6))) < len(tokens):
        count = draw(st.integers(1, min(5, len(tokens) - at)))
        media.append(image(at, count, draw(st.sampled_from([CATS, DOGS]))))
        at += count
    lora = draw(st.sampled_from([None, Lora(0), Lora(-1), Lora(7), Lora(7, "r")]))
    return tokens, Scope(salt=draw(st.sampled_from([None, "", "a", "\u00e9"])), lora=lora, media=tuple(media))


@given(prompts(), st.integers(1, 6), st.integers(0, 4), st.sampled_from([b"", b"k", b"k" * 64]))
def test_K1_K2_X2_a_chain_equals_the_naive_model(
    prompt: tuple[list[int], Scope], tokens_per_block: int, lookahead: int, secret: bytes
) -> None:
    tokens, scope = prompt
    hashing = Hashing(tokens_per_block, lookahead, "akv", secret)
    assert hashes(hashing, scope, tokens) == naive(hashing, scope, tokens)


@given(prompts(), st.integers(1, 6), st.integers(0, 2))
def test_K1_trtllm_hashes_media_into_the_seed(prompt: tuple[list[int], Scope], tokens_per_block: int, lookahead: int) -> None:
    tokens, scope = prompt
    hashing = Hashing(tokens_per_block, lookahead, "trtllm")
    if scope.lora is not None and scope.lora.revision:
        with pytest.raises(SettingsError, match="key_format.*LoRA adapter has a revision"):
            hashing.chain(scope, tokens)
        with pytest.raises(SettingsError, match="no place"):
            hashing.seed(scope)
        return
    assert hashes(hashing, scope, tokens) == naive(hashing, scope, tokens)


@given(prompts(), st.integers(1, 5), st.integers(0, 3), st.data())
def test_K2_K7_hashes_do_not_depend_on_how_tokens_arrive(
    prompt: tuple[list[int], Scope], tokens_per_block: int, lookahead: int, data: st.DataObject
) -> None:
    """Tokens that come later complete blocks, and their lookahead."""
    tokens, scope = prompt
    hashing = Hashing(tokens_per_block, lookahead)
    least = max((item.position + item.tokens for item in scope.media or ()), default=0)
    shown = data.draw(st.integers(least, len(tokens)))
    chain = hashing.chain(scope, tokens[:shown])
    chain.hash_up_to(chain.hashable_blocks)
    for token in tokens[shown:]:
        chain.append([token])
        chain.hash_up_to(chain.hashable_blocks)
    assert chain.hashes(0, chain.hashable_blocks) == naive(hashing, scope, tokens)


@pytest.mark.parametrize(
    ("lookahead", "position", "first"), [(0, 7, 1), (0, 8, 2), (1, 8, 1), (1, 9, 2), (3, 10, 1), (3, 1, 0)]
)
def test_K1_two_images_with_equal_ends_of_their_digests_differ_from_the_first_block_they_touch(
    lookahead: int, position: int, first: int
) -> None:
    one, other = CATS, bytes([99]) + CATS[1:]
    assert one.hex()[-4:] == other.hex()[-4:]
    hashing = Hashing(4, lookahead)
    tokens = list(range(24))
    left, right = (hashes(hashing, Scope(media=(image(position, 2, digest),)), tokens) for digest in (one, other))
    assert left[:first] == right[:first] == hashes(hashing, EMPTY_SCOPE, tokens)[:first]
    assert not set(left[first:]) & set(right[first:])
    assert not set(left[first:]) & set(hashes(hashing, EMPTY_SCOPE, tokens)[first:])


@pytest.mark.parametrize("other", [image(3, 2), image(2, 3), image(2, 2, DOGS)])
def test_K1_position_length_and_content_of_an_image_all_count(other: Media) -> None:
    here, there = (hashes(Hashing(4), Scope(media=(item,)), [0] * 12) for item in (image(2, 2), other))
    assert not set(here) & set(there)


def test_K5_no_salt_and_an_empty_salt_are_one_scope_and_one_value() -> None:
    assert Scope(salt="") == Scope(salt=None) == EMPTY_SCOPE
    assert hash(Scope(salt="")) == hash(EMPTY_SCOPE)
    assert scope_seed(Scope(salt="")) == scope_seed(EMPTY_SCOPE)


def test_K1_a_revision_of_an_adapter_is_none_if_empty_and_another_adapter_else() -> None:
    seeds = [scope_seed(Scope(lora=lora)) for lora in (None, Lora(7), Lora(7, ""), Lora(7, "r1"), Lora(7, "r2"), Lora(8))]
    assert seeds[1] == seeds[2]
    assert len(set(seeds)) == 5


def test_K1_equal_scopes_have_equal_seeds_whatever_types_their_numbers_and_texts_have() -> None:
    class Tenant(enum.StrEnum):
        A = "a"

    plain = Scope(salt="a", lora=Lora(7, "r"), media=(image(4, 2),))
    typed = Scope(
        salt=Tenant.A,
        lora=Lora(np.int64(7), np.str_("r")),  # type: ignore[arg-type]
        media=[image(np.int32(4), np.uint64(2))],  # type: ignore[arg-type]
    )
    assert hashes(Hashing(4), plain, [0] * 12) == hashes(Hashing(4), typed, [0] * 12)
    # And are one value, by which caches of chains and of pages are partitioned.
    assert plain == typed
    assert hash(plain) == hash(typed)


def test_X2_a_secret_keys_seed_and_every_block() -> None:
    plain, one, other = (Hashing(4, 1, "akv", secret) for secret in (b"", b"one", b"other"))
    assert len({hashing.seed(EMPTY_SCOPE) for hashing in (plain, one, other)}) == 3
    seed = one.seed(EMPTY_SCOPE)
    # Not only the seed: whoever knows it cannot go on without the secret.
    block = hashlib.blake2b(seed + struct.pack("<5q", *range(5)), digest_size=16).digest()
    assert hashes(one, EMPTY_SCOPE, list(range(5))) != [block]


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        (Scope(salt="hidden\udc80"), "salt of the request's scope is not valid Unicode"),
        (Scope(salt=b"hidden"), "salt .* is text, not a bytes"),  # type: ignore[arg-type]
        # What is false is no salt, and none: tenant 0 would share everybody's pages.
        (Scope(salt=0), "salt .* is text, not a int"),  # type: ignore[arg-type]
        (Scope(salt=False), "salt .* is text, not a bool"),  # type: ignore[arg-type]
        (Scope(salt=b""), "salt .* is text, not a bytes"),  # type: ignore[arg-type]
        (Scope(media=""), "a tuple of akv.Media, not a str"),  # type: ignore[arg-type]
        (Scope(media=b""), "a tuple of akv.Media, not 0 bytes"),  # type: ignore[arg-type]
        (Scope(lora=0), "is an akv.Lora, not a int"),  # type: ignore[arg-type]
        (Scope(lora=7), "is an akv.Lora, not a int"),  # type: ignore[arg-type]
        (Scope(lora=Lora(2**63)), "an integer of 64 bits"),
        (Scope(lora=Lora(True)), "an integer of 64 bits"),
        (Scope(lora=Lora(1, "\ud800")), "revision of the LoRA adapter .* not valid Unicode"),
        (Scope(media=image(0)), "a tuple of akv.Media, not a Media"),  # type: ignore[arg-type]
        (Scope(media=(CATS,)), "a tuple of akv.Media"),  # type: ignore[arg-type]
        (None, "an akv.Scope, not a NoneType"),
    ],
)
def test_K1_a_scope_that_cannot_be_hashed_is_refused_and_its_salt_not_quoted(scope: Any, message: str) -> None:
    with pytest.raises(TokenError, match=message) as raised:
        Hashing(4).chain(scope, [1])
    assert "hidden" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    ("scope", "tokens"),
    [
        (Scope(salt="hunter2", lora=Lora("x")), [1]),  # type: ignore[arg-type]
        (Scope(salt="hunter2", lora=Lora(1, "\ud800")), [1]),
        (Scope(salt="hunter2\ud800"), [1]),
        (Scope(salt=b"hunter2"), [1]),  # type: ignore[arg-type]
        (Scope(salt="hunter2", media=(image(5),)), [1]),
        (Scope(salt="hunter2"), [0.5]),
    ],
)
def test_X6_no_variable_in_the_traceback_of_a_refused_request_is_its_salt_or_the_secret(
    scope: Scope, tokens: list[Any]
) -> None:
    """Many servers log tracebacks with the variables of each frame, as structlog does unless it is told otherwise."""
    hashing = Hashing(4, secret=b"hunter3")
    with pytest.raises(TokenError) as raised:
        hashing.chain(scope, tokens)
    variables = [repr(entry.frame.f_locals) for entry in raised.traceback[1:]]
    assert variables
    assert not any("hunter" in found for found in variables)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([image(0), image(2, 1, b"short")], r"media\[1\].*32 bytes, not 5 bytes"),
        ([image(0, 1, "d" * 32)], r"media\[0\].*32 bytes, not a str"),  # type: ignore[arg-type]
        ([image(-1)], r"media\[0\].*position is -1; it is at least 0"),
        ([image(0.5)], r"media\[0\].*position is an integer, not a float"),  # type: ignore[arg-type]
        ([image(2**63)], r"media\[0\].*63 bits"),
        ([image(0, 0)], r"media\[0\].*tokens is 0; it is at least 1"),
        ([image(0, True)], r"media\[0\].*tokens is True"),
        ([image(4, 2), image(2)], r"media\[1\].*begins at 2 and comes before .*\(4, 2 tokens\)"),
        ([image(2, 2), image(3)], r"media\[1\].*begins at 3 and overlaps .*\(2, 2 tokens\)"),
        ([image(2), image(2)], r"media\[1\].*overlaps"),
        ([image(0), image(8, 3)], r"media\[1\].*end at 11, and the prompt has 10"),
        ([image(10)], r"media\[0\].*end at 11, and the prompt has 10"),
    ],
)
def test_K1_media_that_cannot_be_are_refused_by_place_and_number(media: list[Media], message: str) -> None:
    with pytest.raises(TokenError, match=message) as raised:
        Hashing(4).chain(Scope(media=tuple(media)), [*range(10), PLACEHOLDER])
    assert CATS.hex() not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_K1_media_may_touch_and_end_with_the_prompt() -> None:
    media = (image(0, 4), image(4, 4, DOGS), image(8, 2))
    assert hashes(Hashing(4), Scope(media=media), [0] * 10) == naive(Hashing(4), Scope(media=media), [0] * 10)


def test_X6_neither_salts_nor_digests_nor_secrets_are_printed() -> None:
    scope = Scope(salt="hunter2", lora=Lora(7, "r"), media=(image(3, 2),))
    assert repr(scope) == (
        "Scope(salt=(hidden), lora=Lora(id=7, revision='r'), media=(Media(digest=(hidden), position=3, tokens=2),))"
    )
    assert repr(EMPTY_SCOPE) == "Scope(salt=None, lora=None, media=())"
    for printed in (repr(Hashing(4, secret=b"hunter2")), str(Hashing(4, secret=b"hunter2").__rich_repr__())):
        assert "hunter2" not in printed
        assert "(hidden)" in printed
    assert "hunter2" not in str(scope.__rich_repr__())


def test_L3_a_slice_is_as_long_as_that_of_any_chain_of_this_server() -> None:
    hashing = Hashing(32, lookahead=1)
    assert hashing.slice_blocks == hashing.chain(EMPTY_SCOPE, range(100)).slice_blocks > 1
