"""Chains of recent requests, so that a follow-up turn hashes only what is new (K7).

The cache is bounded in tokens and partitioned by scope: a chain is found by its seed and the bytes of its first block, and
what it shares with a new sequence is compared, not assumed. Hashes are byte-identical with and without it.
"""

from collections import OrderedDict

from akv.plan.hashing import Chain

#: Chains with the same beginning that one search looks at, newest first. Comparing with one costs microseconds where the
#: sequences part early; a thousand conversations on one system prompt must not cost a millisecond.
MOST_COMPARED = 32


class RecentChains:
    """Keeps the newest chains, `capacity_tokens` tokens in all; 0 keeps none."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._tokens = 0
        #: Oldest first, each with the tokens that it was counted with; a chain may have grown since.
        self._kept: OrderedDict[Chain, int] = OrderedDict()
        self._by_start: dict[bytes, OrderedDict[Chain, None]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tokens(self) -> int:
        """Tokens of the chains that are kept."""
        return self._tokens

    def adopt(self, chain: Chain) -> None:
        """Give `chain` the hashes of the longest prefix that it shares with a kept one, then keep it as the newest.

        A kept chain that is wholly a prefix of this one gives way to it: it has nothing more to offer.
        """
        start = chain.start
        if start is None or not self._capacity_tokens:
            return
        alike = self._by_start.get(start, OrderedDict())
        for other in [other for other, _ in zip(reversed(alike), range(MOST_COMPARED), strict=False) if other is not chain]:
            chain.adopt(other)
            if other.is_prefix_of(chain):
                self._forget(other)
        self._forget(chain)
        self._kept[chain] = chain.length
        self._tokens += chain.length
        self._by_start.setdefault(start, OrderedDict())[chain] = None
        while self._tokens > self._capacity_tokens:
            self._forget(next(iter(self._kept)))

    def _forget(self, chain: Chain) -> None:
        counted = self._kept.pop(chain, None)
        if counted is None or chain.start is None:
            return
        self._tokens -= counted
        alike = self._by_start[chain.start]
        del alike[chain]
        if not alike:
            del self._by_start[chain.start]
