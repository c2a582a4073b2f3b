"""How much of a local match a cache takes: backoff, and where the match may end (P2, P3).

`local_reuse()` is for who embeds `PagedCache`. Who has a cache of their own hands it what `declared_reuse()` says.
"""

from typing import Literal

import msgspec

from akv.errors import SettingsError


class LocalReuse(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of `PagedCache` for what it finds. The default takes whole blocks, all that there are."""

    #: Tokens at a match's end that are computed again, as engines do beside a drafter.
    backoff_tokens: int = 0
    #: Whether matches are taken whole all the same: blocks are named by what a drafter's KV in them depends on, so none of it
    #: is wrong (K2).
    drops_backoff: bool = False
    #: Whether matches end on blocks. Else an offer of the pool cannot go on behind them (L1).
    block_aligned: bool = True
    #: Where matches end that need not end on blocks: at multiples of this, a divisor of T (P3). 0: T.
    match_alignment: int = 0

    def trimmed(self, tokens: int, tokens_per_block: int) -> int:
        """What is left of a match of so many tokens."""
        if not self.drops_backoff:
            tokens = max(0, tokens - self.backoff_tokens)
        return self.aligned(tokens, tokens_per_block)

    def aligned(self, tokens: int, tokens_per_block: int) -> int:
        """The last place up to `tokens` at which a match may end."""
        size = tokens_per_block if self.block_aligned or not self.match_alignment else self.match_alignment
        return tokens - tokens % size


class DeclaredReuse(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine with a cache of its own has to be told about its local matches, so that akv can serve beside it (P2)."""

    #: Its matches have to end on blocks: an offer of the pool goes on behind nothing else (L1).
    requires_block_aligned_reuse: bool = False
    #: It is to take matches whole, beside a drafter too: akv's keys name what a drafter's KV depends on (K2).
    drops_reuse_match_backoff: bool = False


def declared_reuse(local_reuse_backoff: Literal["off", "align"], *, reads: bool) -> DeclaredReuse:
    """What a server declares: with "off" both, with "align" the first alone, and nothing where it does not read (P2).

    `reads`: whether its role is one that reads, "both" or "consumer". Raises SettingsError for another word (fault of whoever
    wrote it).
    """
    if local_reuse_backoff not in {"off", "align"}:
        fix = "Use 'off' or 'align'."
        raise SettingsError("local_reuse_backoff", local_reuse_backoff, "there are two ways to keep matches on blocks", fix)
    return DeclaredReuse(requires_block_aligned_reuse=reads, drops_reuse_match_backoff=reads and local_reuse_backoff == "off")


def local_reuse(
    local_reuse_backoff: Literal["off", "align"],
    *,
    reads: bool,
    backoff_tokens: int = 0,
    reuse_match_alignment: int = 0,
) -> LocalReuse:
    """The rules for a server beside a pool (P2).

    "off" takes matches whole, "align" keeps the engine's backoff and rounds down to a block: so offers go on behind them.
    Where nothing is read (`reads=False`) neither is needed, and matches end as the engine's backoff and
    `reuse_match_alignment` have it. Raises SettingsError for another word (fault of whoever wrote it).
    """
    declared = declared_reuse(local_reuse_backoff, reads=reads)
    return LocalReuse(
        backoff_tokens=backoff_tokens,
        drops_backoff=declared.drops_reuse_match_backoff,
        block_aligned=declared.requires_block_aligned_reuse,
        match_alignment=reuse_match_alignment,
    )


def check_local_reuse(rules: LocalReuse, tokens_per_block: int) -> None:
    """Raises SettingsError for rules that no cache of this block size can follow."""
    if rules.backoff_tokens < 0:
        raise SettingsError("backoff_tokens", rules.backoff_tokens, "there are no fewer tokens", "Use 0 for none.")
    alignment = rules.match_alignment
    if alignment < 0 or (alignment and tokens_per_block % alignment):
        raise SettingsError(
            "reuse_match_alignment",
            alignment,
            f"blocks of {tokens_per_block} tokens would begin where no match can end",
            f"Use a divisor of {tokens_per_block}.",
        )
