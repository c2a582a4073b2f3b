"""What one pass computes: decided from counts alone, without waiting."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec


class Progress(Protocol):
    """What the decision needs to know of a request."""

    @property
    def computed(self) -> int:
        """Tokens whose KV lies in the pages."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Of these, the prompt's."""
        ...

    @property
    def length(self) -> int:
        """Tokens known: the prompt, and what was generated. More than are computed, or the request would have ended."""
        ...

    @property
    def drafts(self) -> int:
        """Draft tokens that it computes on top, in a pass in which it decodes."""
        ...


P = TypeVar("P", bound=Progress)


class PassShape(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's bounds, as `EngineConfig` has them."""

    chunk_tokens: int
    max_tokens: int
    max_running: int


def next_pass(requests: Iterable[P], shape: PassShape) -> list[tuple[P, int]]:
    """Requests, in order of arrival, and how many tokens each computes in the next pass, drafts left out.

    The first `max_running` requests take part. Each that decodes computes its token; then prompts take whole chunks while they
    fit. A chunk is never cut to what is left of the pass: its end depends on the request alone, so its bits do too. For the
    same reason what a preempted request had generated is computed again token by token.
    """
    running = [request for request, _ in zip(requests, range(shape.max_running), strict=False)]
    decoding = [(request, 1) for request in running if _is_decoding(request)]
    left = shape.max_tokens - sum(1 + request.drafts for request, _ in decoding)
    chunks: list[tuple[P, int]] = []
    for request in running:
        if not _is_decoding(request):
            waiting = request.prompt_tokens - request.computed
            count = min(waiting, shape.chunk_tokens - request.computed % shape.chunk_tokens)
            if count <= left:
                chunks.append((request, count))
                left -= count
    return decoding + chunks


def _is_decoding(request: Progress) -> bool:
    return request.computed >= request.prompt_tokens or request.length - request.computed == 1


def tokens_in(batch: Sequence[tuple[P, int]]) -> int:
    """Tokens that a pass computes."""
    return sum(count for _, count in batch)
