"""What computes passes for the engine: the tiny model, sequence by sequence, or another one behind the same seam."""

from collections.abc import Sequence
from typing import Protocol

from akv_testing.engine.model import Model
from akv_testing.engine.pages import Pages
from akv_testing.engine.step import Chunk, Sampled, compute


class Computer(Protocol):
    """Computes passes, one at a time, in whatever thread. Where KV lies is between it and its pages."""

    def compute(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        """Compute a pass and return what each chunk samples, None where nothing is sampled behind it. Blocks the thread.

        On CUDA what is written to pages may still be queued on the execution stream when this returns.
        """
        ...


class OneByOne:
    """The small model: each sequence by itself, so that its bits depend on nothing else in the pass."""

    def __init__(self, model: Model, pages: Pages) -> None:
        #: Whoever sets another one gives the engine new weights, from the next pass on.
        self.model = model
        self._pages = pages

    def compute(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        """As `Computer` says; on CUDA the queue is the current stream's."""
        return [compute(self.model, chunk, self._pages) for chunk in chunks]
