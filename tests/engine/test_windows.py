"""Windows in the reference engine's model: what they see, and that no bit depends on pages that nobody needs."""

from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from akv.plan.window import needed_blocks, stale_blocks
from akv_testing.engine import TINY, AttentionGroup, EngineConfig, Model, ModelConfig, Pages

#: The fixture `dense_logits`, which conftest.py describes.
Dense = Callable[[Model, list[int]], Tensor]

T = 4
TOKENS = [7 * position % 251 for position in range(75)]
#: Chunks of 16, and then tokens one by one, as in decoding.
CUTS = [16, 32, 48, 64, *range(70, 75)]


def model_of(window: int, sinks: int) -> Model:
    """A layer of full attention and two windows, one in bfloat16 and one with other heads."""
    return Model(
        msgspec.structs.replace(
            TINY,
            layers=3,
            groups=(
                AttentionGroup(layers=(1,)),
                AttentionGroup(layers=(0,), window_tokens=window, sink_tokens=sinks, dtype="bfloat16"),
                AttentionGroup(layers=(2,), window_tokens=window, sink_tokens=sinks, kv_heads=1),
            ),
        )
    )


def config_of(model: ModelConfig) -> EngineConfig:
    return EngineConfig(model=model, tokens_per_block=T, pages=32)


class Pagebound:
    """One sequence's pages, scattered, and what is computed in them. NaN stands in every page that it does not have."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config = config_of(model.config)
        self.pages = Pages(self.config)
        for cache in self._caches():
            cache.fill_(float("nan"))
        self.tables = [[(17 * block + 3 * group) % 32 for block in range(20)] for group in range(len(self.config.groups))]

    def compute(self, start: int, cuts: Sequence[int], end: int, *, releases: bool) -> dict[int, Tensor]:
        """Logits by the end of each chunk."""
        ends = [cut for cut in cuts if start < cut < end] + [end]
        logits = {}
        for at, to in zip([start, *ends[:-1]], ends, strict=True):
            logits[to] = self.model.forward(TOKENS[at:to], at, self.tables, self.pages)
            if releases:
                self.release(to)
        return logits

    def release(self, history: int) -> None:
        """Let go of what is stale, as an engine without retention does, for others to overwrite at once."""
        for number, group in enumerate(self.config.groups):
            for block in stale_blocks(history, group.window_tokens, group.sink_tokens, T):
                self._lose(number, block)

    def keep_what_is_needed(self, end_block: int) -> None:
        """As a request that resumes there finds it."""
        for number, group in enumerate(self.config.groups):
            needed = needed_blocks(end_block, group.window_tokens, group.sink_tokens, T)
            for block in set(range(end_block)) - {block for blocks in needed for block in blocks}:
                self._lose(number, block)

    def digests(self, blocks: int) -> list[list[bytes]]:
        return [list(group) for group in self.pages.digests(self.tables, blocks)]

    def _lose(self, group: int, block: int) -> None:
        page, self.tables[group][block] = self.tables[group][block], -1
        if page >= 0:
            for cache in self.pages.caches[group]:
                cache[page] = float("nan")

    def _caches(self) -> list[Tensor]:
        return [cache for regions in self.pages.caches for cache in regions]


@pytest.mark.parametrize("sinks", [0, 1, 40])
@pytest.mark.parametrize("window", [1, 2, 6, 19, 100])
def test_W1_windows_on_pages_equal_a_dense_mask(dense_logits: Dense, window: int, sinks: int) -> None:
    model = model_of(window, sinks)
    expected = dense_logits(model, TOKENS)
    for end, logits in Pagebound(model).compute(0, CUTS, len(TOKENS), releases=True).items():
        torch.testing.assert_close(logits, expected[end - 1], atol=1e-3, rtol=1e-3)


def test_W1_a_window_that_is_off_by_one_is_seen(dense_logits: Dense) -> None:
    # The tolerance above has to be narrow enough to tell neighbours apart.
    for window, sinks in [(5, 0), (7, 0), (6, 1)]:
        other = Pagebound(model_of(window, sinks)).compute(0, CUTS, len(TOKENS), releases=True)
        expected = dense_logits(model_of(6, 0), TOKENS)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(other[len(TOKENS)], expected[-1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("sinks", [0, 1, 9])
@pytest.mark.parametrize("window", [1, 6, 7, 8, 9, 19, 100])
def test_Q1_bits_are_the_same_whatever_pages_are_kept_and_wherever_a_request_resumes(window: int, sinks: int) -> None:
    model = model_of(window, sinks)
    for length in range(60, 60 + T):  # every residue
        keeps = Pagebound(model)
        expected = keeps.compute(0, CUTS, length, releases=False)
        frees = Pagebound(model)
        assert_same_bits(frees.compute(0, CUTS, length, releases=True), expected)
        for end_block in (4, 8, 12):  # where a chunk ends, so that the chunks are the same
            resumes = Pagebound(model)
            resumes.compute(0, CUTS, end_block * T, releases=False)
            resumes.keep_what_is_needed(end_block)
            again = resumes.compute(end_block * T, CUTS, length, releases=True)
            assert again
            assert_same_bits(again, {end: expected[end] for end in again})
            for ours, theirs in zip(resumes.digests(length // T), keeps.digests(length // T), strict=True):
                assert all(a in (b, b"") for a, b in zip(ours, theirs, strict=True))


def test_W1_a_page_that_is_needed_and_gone_is_no_silent_zero() -> None:
    sequence = Pagebound(model_of(6, 1))
    sequence.compute(0, CUTS, 32, releases=True)
    sequence.tables[1][0] = -1  # its sinks
    with pytest.raises(AssertionError, match=r"\[32, 48\) read blocks \[0\]"):
        sequence.compute(32, CUTS, 48, releases=True)


def assert_same_bits(ours: dict[int, Tensor], theirs: dict[int, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for end, logits in ours.items():
        assert not logits.isnan().any()
        assert torch.equal(logits, theirs[end]), end
