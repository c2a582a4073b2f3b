"""What `akv bench vllm` measures, and what it must not exceed."""

from statistics import median

import msgspec

#: What a hit from the pool may take beyond a local hit, and what saving may add to a cold request, in parts of what vLLM's own
#: connector needs for it.
MOST_OF_THEIRS = 0.5
#: What a hit may take beyond a local one where another process of this host lends the memory, which akv reads directly.
MOST_OF_THEIRS_ELSEWHERE = 0.25
#: What saving may add to a cold request, in parts of one without a connector.
MOST_OF_COLD = 0.1


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request, by rounds. In milliseconds, from the first request's arrival to the last one's end."""

    median: float
    least: float
    most: float
    all: tuple[float, ...]


class ConnectorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One connector. Without one, what would be a hit from the pool is computed once more."""

    connector: str
    cold: Times
    local_hit: Times
    pool_hit: Times
    #: `VllmFigures.at_once` requests with a prompt each, all from the pool.
    at_once: Times
    #: Medians over the rounds: a hit from the pool minus the local hit of the same round, and a cold request minus the one of
    #: the same round without a connector.
    pool_beyond_local: float
    cold_beyond_none: float | None


class VllmFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv bench vllm --json` prints."""

    vllm: str
    model: str
    prompt_tokens: int
    answer_tokens: int
    #: Whether the memory of the pools is another process's.
    pages_elsewhere: bool
    #: Tensor-parallel ranks in processes of their own; 0: one in the server's.
    ranks: int = 0
    rounds: int
    at_once: int
    connectors: tuple[ConnectorFigures, ...]
    #: What does not hold, a sentence each.
    missed: tuple[str, ...]


def times(seconds: list[float]) -> Times:
    """The times of all rounds."""
    milliseconds = tuple(1000 * each for each in seconds)
    return Times(median=median(milliseconds), least=min(milliseconds), most=max(milliseconds), all=milliseconds)


def missed(
    none: ConnectorFigures | None,
    theirs: ConnectorFigures | None,
    ours: ConnectorFigures | None,
    *,
    pages_elsewhere: bool,
) -> tuple[str, ...]:
    """What does not hold of akv's figures beside the others, a sentence each; nothing is said of what was not measured."""
    if ours is None:
        return ()
    sentences: list[str] = []
    if theirs is not None:
        share = MOST_OF_THEIRS_ELSEWHERE if pages_elsewhere else MOST_OF_THEIRS
        allowed = share * theirs.pool_beyond_local
        if ours.pool_beyond_local > allowed:
            sentences.append(
                f"a hit from the pool takes {ours.pool_beyond_local:.1f} ms beyond a local one, more than {allowed:.1f}, "
                f"{share:g} of what vLLM's own connector needs"
            )
        if ours.at_once.median > theirs.at_once.median:
            sentences.append(
                f"requests at once from the pool take {ours.at_once.median:.1f} ms, vLLM's own connector "
                f"{theirs.at_once.median:.1f}"
            )
    if none is not None and ours.cold_beyond_none is not None:
        beyond, allowed = ours.cold_beyond_none, MOST_OF_COLD * none.cold.median
        if theirs is not None and theirs.cold_beyond_none is not None:
            allowed = min(allowed, MOST_OF_THEIRS * max(0.0, theirs.cold_beyond_none))
        if beyond > allowed:
            sentences.append(
                f"saving adds {beyond:.1f} ms to a cold request of {none.cold.median:.1f}, more than {allowed:.1f}"
            )
    return tuple(sentences)
