"""The chain of block hashes: vectors, a naive model, and independence of how tokens arrive (K1, K5, K6, K7, L3)."""

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import TokenError
from akv.plan.hashing import Chain, scope_seed
from akv.plan.tokens import PLACEHOLDER
from akv.values.scope import EMPTY_SCOPE, Scope

SEED = scope_seed(EMPTY_SCOPE)
TOKENS = st.lists(st.integers(0, 3), max_size=30)
#: T=4, tokens 0..8, empty scope (K1).
VECTOR = ["2cbd989e68a1d62fe8bebc04262e3dd9", "2a4fd6d9610279f6733a044d56664a9d"]


def chain_of(tokens: list[int], tokens_per_block: int = 4, seed: bytes = SEED) -> Chain:
    chain = Chain(seed, tokens_per_block)
    chain.append(tokens)
    return chain


def all_hashes(chain: Chain) -> list[bytes]:
    return chain.hashes(0, chain.hashable_blocks)


def naive(tokens: list[int], tokens_per_block: int, salt: str = "") -> list[bytes]:
    """K1, word for word."""

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    encoded_salt = salt.encode()
    previous = digest(struct.pack("<I", len(encoded_salt)) + encoded_salt + struct.pack("<I", 0))
    result = []
    for b in range(len(tokens) // tokens_per_block):
        block = tokens[b * tokens_per_block : (b + 1) * tokens_per_block]
        previous = digest(previous + b"".join(struct.pack("<q", token) for token in block))
        result.append(previous)
    return result


@pytest.mark.parametrize(
    ("scope", "seed"),
    [
        (EMPTY_SCOPE, "c804ce198ec337e3dc762bdd1a09aece"),
        (Scope(salt="tenant-a"), "1c3d1880c5954bdcaa8fe0d8866c4700"),
    ],
)
def test_K1_vectors_of_the_seed(scope: Scope, seed: str) -> None:
    assert scope_seed(scope).hex() == seed


def test_K1_vectors_of_the_chain() -> None:
    assert [block.hex() for block in all_hashes(chain_of(list(range(9))))] == VECTOR


def test_K5_no_salt_and_an_empty_salt_are_one_scope() -> None:
    assert scope_seed(Scope(salt=None)) == scope_seed(Scope(salt="")) == SEED


def test_K1_a_salt_that_is_not_unicode_is_refused_and_not_quoted() -> None:
    with pytest.raises(TokenError, match="salt") as raised:
        scope_seed(Scope(salt="hidden\udc80"))
    assert "hidden" not in str(raised.value)
    assert raised.value.__context__ is None  # that of the codec quotes it


@given(TOKENS, st.integers(1, 7), st.text(max_size=5))
def test_K1_a_chain_equals_the_naive_model(tokens: list[int], tokens_per_block: int, salt: str) -> None:
    chain = chain_of(tokens, tokens_per_block, scope_seed(Scope(salt=salt)))
    assert all_hashes(chain) == naive(tokens, tokens_per_block, salt)
    assert (chain.length, chain.hashable_blocks) == (len(tokens), len(tokens) // tokens_per_block)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_K1_hashes_are_equal_exactly_where_prefixes_are(left: list[int], right: list[int], tokens_per_block: int) -> None:
    of_left, of_right = (all_hashes(chain_of(tokens, tokens_per_block)) for tokens in (left, right))
    for block in range(min(len(of_left), len(of_right))):
        end = (block + 1) * tokens_per_block
        assert (of_left[block] == of_right[block]) == (left[:end] == right[:end])


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=9), st.integers(0, 2), st.booleans())), st.integers(1, 5))
def test_K7_a_chain_is_independent_of_how_its_tokens_arrive(
    parts: list[tuple[list[int], int, bool]], tokens_per_block: int
) -> None:
    chain = Chain(SEED, tokens_per_block)
    for tokens, unconfirmed, hash_now in parts:
        given_tokens = tokens + [PLACEHOLDER] * unconfirmed
        chain.append(np.array(given_tokens, dtype=np.int32) if unconfirmed == 1 else given_tokens)
        if hash_now:
            all_hashes(chain)
    whole = [token for tokens, _, _ in parts for token in tokens]
    assert all_hashes(chain) == all_hashes(chain_of(whole, tokens_per_block))


@given(TOKENS, st.integers(1, 4), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4))))
def test_K7_hashes_on_demand_equal_hashes_at_once(
    tokens: list[int], tokens_per_block: int, asks: list[tuple[int, int, int]]
) -> None:
    whole = all_hashes(chain_of(tokens, tokens_per_block))
    chain = chain_of(tokens, tokens_per_block)
    for lo, asked, at_most in asks:
        hi = min(asked, chain.hashable_blocks)
        before = chain.hash_up_to(0)
        assert chain.hash_up_to(hi, at_most) == max(before, min(hi, before + at_most))
        assert chain.hashes(lo, hi) == whole[lo:hi]


def test_K6_a_block_with_an_unconfirmed_token_has_no_hash_until_it_is_confirmed() -> None:
    chain = chain_of([0, 1, 2, 3, 4, 5, PLACEHOLDER, PLACEHOLDER])
    assert (chain.length, chain.hashable_blocks) == (6, 1)
    with pytest.raises(ValueError, match="2 blocks asked of a chain that has 1"):
        chain.hash_up_to(2)
    with pytest.raises(ValueError, match="2 blocks"):
        chain.hashes(0, 2)
    chain.append([6, 7, 8])
    assert [block.hex() for block in all_hashes(chain)] == VECTOR


@given(TOKENS, st.data())
def test_K7_a_resumed_sequence_appends_only_its_tail(tokens: list[int], data: st.DataObject) -> None:
    seen = data.draw(st.integers(0, len(tokens)))
    chain = chain_of(tokens[:seen], 3)
    hashed = chain.hash_up_to(chain.hashable_blocks)
    chain.observe([*tokens, PLACEHOLDER])
    assert chain.hash_up_to(0) == hashed
    assert chain.length == len(tokens)
    assert all_hashes(chain) == naive(tokens, 3)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([5, 6, 7], "3 confirmed tokens, but 4 "),
        ([5, 6, 7, PLACEHOLDER], "3 confirmed tokens, but 4 "),
        ([5, 6, 77, 88], "position 2: it differs"),
        ([55, 6, 7, 8, 9], "position 0: it differs"),
        ([5, 6, 7, 8, 2**64], "position 4: .*int64"),
    ],
)
def test_K6_a_sequence_that_does_not_go_on_from_what_was_seen_is_refused(sequence: list[int], message: str) -> None:
    chain = chain_of([5, 6, 7, 8], 2)
    with pytest.raises(TokenError, match=message):
        chain.observe(sequence)
    assert all_hashes(chain) == naive([5, 6, 7, 8], 2)


def test_L3_a_slice_is_bounded_in_bytes_and_never_empty() -> None:
    slices = [Chain(SEED, tokens_per_block).slice_blocks for tokens_per_block in (1, 16, 32, 128, 10**6)]
    assert slices == sorted(slices, reverse=True)
    assert slices[-1] == 1
    assert 100 < slices[2] < 1000


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_K1_a_fresh_process_computes_the_same_bytes(hash_seed: str) -> None:
    program = (
        "from akv.plan.hashing import Chain, scope_seed\n"
        "from akv.values.scope import Scope\n"
        "chain = Chain(scope_seed(Scope()), 4); chain.append(range(9))\n"
        "import sys; sys.stdout.write(' '.join(block.hex() for block in chain.hashes(0, 2)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == VECTOR
