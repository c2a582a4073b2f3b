"""What one pass computes of one request, drafts included: run by the thread that computes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from akv.values.scope import Lora
from akv_testing.engine.drafter import Drafter, Guess
from akv_testing.engine.model import Model
from akv_testing.engine.pages import Pages


class Chunk(NamedTuple):
    """One request's part. A copy, so that the thread that computes reads nothing that the loop changes."""

    tokens: tuple[int, ...]
    #: The position of the first one.
    start: int
    tables: tuple[tuple[int, ...], ...]
    #: The token behind the last one; None if that is sampled now.
    following: int | None
    keep_logits: bool
    lora: Lora | None = None
    #: Tokens to draft behind the last one and to verify, and the first of them.
    drafts: int = 0
    guess: Guess | None = None
    #: Per layer group, a page to copy first and the one to copy it to; empty as a rule.
    copies: tuple[tuple[int, int], ...] = ()


class Sampled(NamedTuple):
    """What a chunk that samples gives."""

    #: The tokens behind the chunk: one, and one more for each draft that was right.
    tokens: tuple[int, ...]
    #: The logits of each, (tokens, vocabulary), on the CPU.
    logits: Tensor | None
    #: Drafts that the target did not give itself: they and those behind them are taken back.
    rejected: int
    #: Where the next pass begins to draft.
    guess: Guess | None


def compute(model: Model, chunk: Chunk, pages: Pages) -> Sampled | None:
    """Compute a chunk; None if nothing is sampled behind it. Blocks the thread."""
    pages.copy(chunk.copies)
    if model.drafter is not None:
        with torch.inference_mode():
            return _with_drafter(model, model.drafter, chunk, pages)
    logits = model.forward(chunk.tokens, chunk.start, chunk.tables, pages, chunk.lora)
    if chunk.following is not None:
        return None
    kept = logits.unsqueeze(0).cpu() if chunk.keep_logits else None
    return Sampled((int(logits.argmax()),), kept, rejected=0, guess=None)


def _with_drafter(model: Model, drafter: Drafter, chunk: Chunk, pages: Pages) -> Sampled | None:
    """The target verifies all drafts in one forward; the drafter then follows it as far as it confirmed them."""
    newest = chunk.start + len(chunk.tokens) - 1
    drafts: list[int] = []
    if chunk.drafts and chunk.guess is not None:
        drafts = drafter.draft(model, chunk.guess, chunk.drafts, newest, chunk.tables, pages)
    hidden = model.hidden_states((*chunk.tokens, *drafts), chunk.start, chunk.tables, pages, chunk.lora)
    if chunk.following is not None:
        drafter.follow(model, hidden, (*chunk.tokens[1:], chunk.following), chunk.start, chunk.tables, pages)
        return None
    logits = model.logits(hidden[len(chunk.tokens) - 1 :])
    tokens = confirmed(drafts, logits.argmax(dim=-1).tolist())
    there = len(chunk.tokens) + len(tokens) - 1
    guess = drafter.follow(model, hidden[:there], (*chunk.tokens[1:], *tokens), chunk.start, chunk.tables, pages)
    kept = logits[: len(tokens)].cpu() if chunk.keep_logits else None
    return Sampled(tokens, kept, rejected=len(drafts) - (len(tokens) - 1), guess=guess)


def confirmed(drafts: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
    """Greedy verification: what the target gives as long as the drafts before it are its own.

    `given[i]` is the target's token behind the first i drafts, one more than there are drafts.
    """
    right = next((at for at, draft in enumerate(drafts) if draft != given[at]), len(drafts))
    return tuple(given[: right + 1])
