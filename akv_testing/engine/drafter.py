"""The drafter: guesses the tokens behind the newest one, from what the target's last layer gave and from that token.

"eagle3" has one layer of attention with KV of its own in the target's cache. Its KV of position i is made of what the target
gave at i and of the token at i + 1: so it depends on one more token than the target's (K2). "hidden_state" has no KV.

Random weights guess one token in a vocabulary. So that guesses are right now and then, the drafter has the target's
own SwiGLUs, which make most of what a random transformer says, and lacks its attention, which makes the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from akv_testing.engine.config import ModelConfig
from akv_testing.engine.layers import Attention, norm, random_matrix
from akv_testing.engine.pages import Pages

if TYPE_CHECKING:
    from akv_testing.engine.model import Model

#: Size of what the target gave, next to the token's embedding.
_FUSED_SCALE = 0.3


class Guess(NamedTuple):
    """A drafted token, and what the drafter made of it: where the next guess goes on from. Made by one pass for the next."""

    token: int
    #: (1, hidden), in the place of what the target would give.
    hidden: Tensor


class Drafter:
    """Weights, and the two steps of drafting. Has no state between passes, as the target."""

    def __init__(self, config: ModelConfig, kv_heads: int | None, generator: torch.Generator, device: torch.device) -> None:
        """`kv_heads`: of its own attention; None for a drafter without."""
        #: Its layer's number, behind those of the target.
        self._number = config.layers
        self._fuse = random_matrix(generator, config.hidden, config.hidden).mul_(_FUSED_SCALE).to(device)
        self._attention = None if kv_heads is None else Attention(config, kv_heads, generator, device)

    def follow(
        self,
        model: "Model",
        hidden: Tensor,
        following: Sequence[int],
        start: int,
        tables: Sequence[Sequence[int]],
        pages: Pages,
    ) -> Guess:
        """Compute the positions from `start` on, whose KV goes to their pages, and guess what comes behind the last of
        `following`.

        `hidden`: what the target gave at each position, (tokens, hidden); `following`: the token behind each.
        """
        x = model.embed(following) + norm(hidden, model.final_norm) @ self._fuse
        if self._attention is not None:
            place = pages.place(self._number, tables, start, start + len(following), model.device)
            x = x + self._attention.attend(x, place, *pages.layer(self._number), model.rope)
        x = x[-1:]
        for layer in model.layers:
            x = x + layer.transform(x)
        return Guess(int(model.logits(x[0]).argmax()), x)

    def draft(
        self, model: "Model", guess: Guess, count: int, start: int, tables: Sequence[Sequence[int]], pages: Pages
    ) -> list[int]:
        """`count` tokens behind the newest one, which stands at `start`; `guess` is the first.

        Each next one takes the guess for the target's word. What that leaves in the pages, from `start` on, `follow()`
        overwrites when the target has spoken.
        """
        drafts = [guess.token]
        while len(drafts) < count:
            guess = self.follow(model, guess.hidden, [guess.token], start + len(drafts) - 1, tables, pages)
            drafts.append(guess.token)
        return drafts
