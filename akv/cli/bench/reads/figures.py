"""What `akv bench reads` measures, and what it must not fall short of (R1, R3): ratios within one run alone."""

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

#: How many times faster pages of another process's memory are read in place than through the store's client: at least.
LEAST_OVER_STAGED = 5.0
#: Of the speed of a plain copy of the same bytes from the same memory into the same pages.
LEAST_OF_PLAIN = 0.8
#: How many times faster pages are saved into memory that was touched before than into memory that was not.
LEAST_OVER_FRESH = 3.0


class ReadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one shape, loaded in three ways. Bytes per second, medians of the rounds."""

    page_bytes: int
    #: Pieces that a page consists of, each in a tensor of its own.
    regions: int
    pages: int
    #: Read in place; through the store's client; and copied piece by piece from a mapping of the memory, without akv.
    direct: float
    staged: float
    plain: float
    #: Medians of the rounds' own ratios of speed.
    direct_over_staged: float
    direct_over_plain: float


class SaveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that a server saves into memory that it lends itself. Bytes per second, medians of the rounds."""

    page_bytes: int
    pages: int
    #: Into memory that was touched before, and into memory that nobody has touched.
    touched: float
    fresh: float
    #: The median of the rounds' own ratios of speed.
    touched_over_fresh: float


class ReadsFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What `akv bench reads --json` prints."""

    rounds: int
    reads: tuple[ReadFigures, ...]
    saves: SaveFigures
    #: What does not hold, a sentence each.
    missed: tuple[str, ...] = ()


def ratio(faster: Sequence[float], slower: Sequence[float]) -> float:
    """The median over the rounds of how many times faster the first was, given the seconds of both for the same bytes."""
    return median(other / one for one, other in zip(faster, slower, strict=True))


def missed(figures: ReadsFigures) -> tuple[str, ...]:
    """What does not hold, a sentence each."""
    return tuple(_of_reads(figures.reads)) + tuple(_of_saves(figures.saves))


def _of_reads(reads: Sequence[ReadFigures]) -> Iterator[str]:
    for each in reads:
        pages = f"pages of {each.page_bytes >> 10} KiB in {each.regions} regions"
        if each.direct_over_staged < LEAST_OVER_STAGED:
            yield (
                f"{pages} are read in place {each.direct_over_staged:.2f} times as fast as through the store's client, not "
                f"{LEAST_OVER_STAGED:g}"
            )
        if each.direct_over_plain < LEAST_OF_PLAIN:
            yield f"{pages} are read at {each.direct_over_plain:.2f} of a plain copy's speed, less than {LEAST_OF_PLAIN:g}"


def _of_saves(saves: SaveFigures) -> Iterator[str]:
    if saves.touched_over_fresh < LEAST_OVER_FRESH:
        yield (
            f"pages are saved into memory that was touched {saves.touched_over_fresh:.2f} times as fast as into fresh memory, "
            f"not {LEAST_OVER_FRESH:g}"
        )
