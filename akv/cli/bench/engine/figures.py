"""What `akv bench engine` measures, and what it must not exceed on a GPU of the kind that the bounds were set for."""

from collections.abc import Iterator
from statistics import median, quantiles

import msgspec

#: Milliseconds of a hit from the pool beyond a local one, by the prompt's tokens. Of 128 KiB of KV each.
MOST_BEYOND_LOCAL_MS = {8_000: 40.0, 32_000: 130.0, 96_000: 330.0}
#: What saving may add to a cold request, in parts of one without a connector.
MOST_FOR_SAVING = 0.03
#: What a load may add to the steps of another request: at the median, at the 99th percentile.
MOST_BESIDE_MEDIAN = 0.05
MOST_BESIDE_P99 = 0.20
#: Seconds for so many loads of so many tokens at once.
AT_ONCE, AT_ONCE_TOKENS, MOST_AT_ONCE_S = 8, 32_000, 1.0
#: Of what one long copy from pinned memory moves per second.
LEAST_OF_PINNED_COPY = 0.85
#: Of SDPA's own operations per second, so that a cold prompt is a fair opponent.
LEAST_OF_SDPA = 0.40


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    median: float
    p99: float
    most: float
    count: int


class PromptFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of one length: milliseconds to the first token, medians."""

    tokens: int
    #: By an engine without a connector.
    cold: float
    local_hit: float
    #: Computed and saved, by an engine with one. Then how long it took until all was saved.
    cold_with_saving: float
    saved_after: float
    #: Bytes stored, and stored per second from the request's beginning to its last save's end.
    saved_bytes: int
    saved_bytes_per_s: float
    #: From memory that another process lends: read in place, and through the store's client.
    pool_hit: float
    staged_hit: float
    #: Bytes that a hit from the pool loads, and per second, from the load's order to its end.
    loaded_bytes: int
    loaded_bytes_per_s: float

    @property
    def beyond_local(self) -> float:
        """Milliseconds that a hit from the pool takes beyond a local one."""
        return self.pool_hit - self.local_hit


class BesideFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a request that decodes, while nothing else goes on, and while others load."""

    tokens: int
    loads: int
    alone: Times
    beside: Times
    #: The same, beside loads through the store's client.
    beside_staged: Times | None = None


class AtOnceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are asked at once, all of them hits from the pool."""

    requests: int
    tokens: int
    #: From the first call to the last first token.
    seconds: float
    #: Milliseconds to the first token.
    first_tokens: Times


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv bench engine --json` prints."""

    device: str
    shape: str
    tokens_per_block: int
    rounds: int
    prompts: tuple[PromptFigures, ...]
    beside: BesideFigures
    at_once: AtOnceFigures
    #: Bytes per second of one long copy from pinned memory.
    pinned_copy_bytes_per_s: float
    #: Operations per second of attention over the longest prompt: SDPA by itself, the engine's in chunks over pages.
    sdpa_flops: float
    engine_flops: float
    #: Loads that did not read every page in place although they were to, behind the first ones: the memory is mapped by then.
    not_in_place: int
    #: What does not hold, a sentence each. Empty where there is nothing to judge: on a CPU, or with another shape.
    missed: tuple[str, ...] = ()


def times(seconds: list[float]) -> Times:
    """Of some seconds, at least one."""
    milliseconds = [1000 * each for each in seconds]
    p99 = quantiles(milliseconds, n=100, method="inclusive")[-1] if len(milliseconds) > 1 else milliseconds[0]
    return Times(median=median(milliseconds), p99=p99, most=max(milliseconds), count=len(milliseconds))


def missed(figures: EngineFigures) -> tuple[str, ...]:
    """What does not hold, a sentence each; nothing is said of what was not measured."""
    return (*_of_prompts(figures), *_of_the_rest(figures))


def _of_prompts(figures: EngineFigures) -> Iterator[str]:
    for each in figures.prompts:
        most = MOST_BEYOND_LOCAL_MS.get(each.tokens)
        if most is not None and each.beyond_local > most:
            yield (
                f"{each.tokens:,} tokens: a hit from the pool takes {each.beyond_local:.1f} ms beyond a local one, more than "
                f"{most:g}"
            )
        allowed = (1 + MOST_FOR_SAVING) * each.cold
        if each.cold_with_saving > allowed:
            yield (
                f"{each.tokens:,} tokens: a cold request that is saved takes {each.cold_with_saving:.1f} ms, "
                f"{each.cold_with_saving / each.cold - 1:.1%} more than {each.cold:.1f} without a connector"
            )
    longest = max(figures.prompts, key=lambda each: each.tokens)
    share = longest.loaded_bytes_per_s / figures.pinned_copy_bytes_per_s
    if share < LEAST_OF_PINNED_COPY:
        yield (
            f"{longest.tokens:,} tokens are loaded at {longest.loaded_bytes_per_s / 1e9:.1f} GB/s, {share:.2f} of a copy from "
            f"pinned memory, less than {LEAST_OF_PINNED_COPY}"
        )


def _of_the_rest(figures: EngineFigures) -> Iterator[str]:
    alone, beside = figures.beside.alone, figures.beside.beside
    for name, ours, base, most in (
        ("median", beside.median, alone.median, MOST_BESIDE_MEDIAN),
        ("99th percentile", beside.p99, alone.p99, MOST_BESIDE_P99),
    ):
        if ours > (1 + most) * base:
            yield f"a step beside loads takes {ours:.2f} ms at the {name}, {ours / base - 1:.1%} more than {base:.2f} alone"
    at_once = figures.at_once
    if (at_once.requests, at_once.tokens) == (AT_ONCE, AT_ONCE_TOKENS) and at_once.seconds > MOST_AT_ONCE_S:
        yield f"{AT_ONCE} loads of {AT_ONCE_TOKENS:,} tokens at once take {at_once.seconds:.2f} s, over {MOST_AT_ONCE_S:g}"
    share = figures.engine_flops / figures.sdpa_flops
    if share < LEAST_OF_SDPA:
        yield f"the engine's attention runs at {share:.2f} of SDPA's own speed, less than {LEAST_OF_SDPA}"
    if figures.not_in_place:
        yield f"{figures.not_in_place} loads read pages through the store's client that another process lends on this host"
