"""Where a local match may end: backoff, alignment, and what windows leave of it (P2, P3)."""

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.errors import SettingsError
from akv.host import DeclaredReuse, LocalReuse, PagedCache, Window, declared_reuse, local_reuse

T = 4
PROMPT = range(17)


def warm(rules: LocalReuse, **arguments: object) -> PagedCache:
    cache = PagedCache(T, [32], local_reuse=rules, **arguments)  # type: ignore[arg-type]
    sequence = cache.admit(PROMPT, len(PROMPT))
    assert sequence is not None
    sequence.commit(len(PROMPT))
    sequence.release()
    return cache


@pytest.mark.parametrize(
    ("word", "reads", "alignment", "matched"),
    [
        ("off", True, 0, 16),
        ("align", True, 0, 12),
        ("align", True, 1, 12),  # offers go on behind blocks, whatever else is asked for
        ("off", False, 0, 12),
        ("off", False, 1, 15),
        ("off", False, 2, 14),
        ("align", False, 1, 15),
    ],
)
def test_P2_P3_a_match_ends_where_backoff_role_and_alignment_have_it(
    word: Literal["off", "align"], reads: bool, alignment: int, matched: int
) -> None:
    cache = warm(local_reuse(word, reads=reads, backoff_tokens=1, reuse_match_alignment=alignment), lookahead_tokens=0)
    assert cache.match(PROMPT) == matched
    sequence = cache.admit(PROMPT, len(PROMPT))
    assert sequence is not None
    assert sequence.local_tokens == sequence.computed_tokens == matched  # probe and claim agree
    assert cache.check() == []
    sequence.release()
    assert cache.check() == []


def test_P2_only_who_reads_declares_block_aligned_reuse_and_only_off_drops_the_backoff() -> None:
    roles: list[tuple[Literal["off", "align"], bool]] = [("off", True), ("align", True), ("off", False), ("align", False)]
    declared = [declared_reuse(word, reads=reads) for word, reads in roles]
    assert declared == [
        DeclaredReuse(requires_block_aligned_reuse=True, drops_reuse_match_backoff=True),
        DeclaredReuse(requires_block_aligned_reuse=True, drops_reuse_match_backoff=False),
        DeclaredReuse(requires_block_aligned_reuse=False, drops_reuse_match_backoff=False),
        DeclaredReuse(requires_block_aligned_reuse=False, drops_reuse_match_backoff=False),
    ]
    # What our own cache does is what it would be told.
    for (word, reads), told in zip(roles, declared, strict=True):
        rules = local_reuse(word, reads=reads)
        assert (rules.block_aligned, rules.drops_backoff) == tuple(msgspec.structs.astuple(told))


def test_P3_a_match_inside_a_block_is_copied_and_never_written_where_others_read() -> None:
    cache = warm(LocalReuse(backoff_tokens=2, block_aligned=False, match_alignment=2))
    first = cache.admit(PROMPT, len(PROMPT))
    second = cache.admit(PROMPT, len(PROMPT))
    assert first is not None
    assert second is not None
    assert first.local_tokens == second.local_tokens == 14
    ((source, target),) = first.copies
    ((other_source, other_target),) = second.copies
    assert source == other_source
    assert len({source, target, other_target}) == 3
    assert first.page_tables()[0][3] == target
    first.commit(17)  # the block stands in the tree already
    assert cache.check() == []
    cache.evict_idle()
    assert cache.match(PROMPT) == 14
    first.release()
    second.release()
    assert cache.check() == []
    assert cache.evict_idle() == 4
    assert cache.free_pages == (32,)


def test_P3_a_sequence_as_large_as_the_cache_does_without_a_copy() -> None:
    cache = PagedCache(T, [4], local_reuse=LocalReuse(backoff_tokens=2, block_aligned=False, match_alignment=2))
    sequence = cache.admit(range(16), 16)
    assert sequence is not None
    sequence.commit(16)
    sequence.release()
    again = cache.admit(range(16), 16)
    assert again is not None
    assert (again.local_tokens, again.copies) == (8, ())
    assert cache.check() == []


def test_P3_what_windows_prune_is_trimmed_again_to_a_block() -> None:
    rules = LocalReuse(backoff_tokens=1, block_aligned=False, match_alignment=1)
    cache = PagedCache(T, [32, 32], [Window(), Window(5)], local_reuse=rules, retention_tokens=4)
    sequence = cache.admit(PROMPT, len(PROMPT))
    assert sequence is not None
    sequence.prepare(17)
    sequence.commit(17)
    sequence.release()
    again = cache.admit(PROMPT, len(PROMPT))
    assert again is not None
    assert again.local_tokens == cache.match(PROMPT) == 12
    assert again.copies == ()
    assert cache.check() == []


@given(st.integers(0, 20), st.integers(0, 9), st.sampled_from([0, 1, 2, 4]), st.booleans(), st.booleans())
def test_P3_probe_and_claim_agree_and_keep_what_they_promise(
    length: int, backoff: int, alignment: int, aligned: bool, drops: bool
) -> None:
    rules = LocalReuse(backoff_tokens=backoff, match_alignment=alignment, block_aligned=aligned, drops_backoff=drops)
    cache, tokens = warm(rules), range(length + 1)
    matched = cache.match(tokens)
    sequence = cache.admit(tokens, length + 1)
    assert sequence is not None
    assert sequence.local_tokens == matched
    found = min(16, length // T * T)
    assert matched <= max(0, found - (0 if drops else backoff))
    assert matched % (T if aligned or not alignment else alignment) == 0
    assert cache.check() == []


@pytest.mark.parametrize("alignment", [-1, 3, 8])
def test_P3_an_alignment_that_is_no_divisor_of_a_block_is_refused(alignment: int) -> None:
    with pytest.raises(SettingsError, match=r"reuse_match_alignment.*divisor of 4"):
        PagedCache(T, [8], local_reuse=LocalReuse(block_aligned=False, match_alignment=alignment))


@pytest.mark.parametrize("rules", [local_reuse, declared_reuse])
@pytest.mark.parametrize("reads", [True, False])
def test_P2_other_words_are_refused(rules: Callable[..., object], reads: bool) -> None:
    with pytest.raises(SettingsError, match="local_reuse_backoff"):
        rules("on", reads=reads)
