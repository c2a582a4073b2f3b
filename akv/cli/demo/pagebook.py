"""Which bytes the page of each prefix has: noted by the process that computes it, looked up by the process that loads it."""

from collections.abc import Sequence

import msgspec

from akv.plan.hashing import Chain, scope_seed
from akv.values.scope import EMPTY_SCOPE

#: A block's page in each layer group, as a digest of its bytes.
PageDigests = tuple[bytes, ...]


class PageBook(msgspec.Struct):
    """Digests of pages, by the hash of the prefix that their block ends (lower-case hex).

    A pool keeps the first value that was put under a key, and two requests at a time may compute the same block. Which of the
    two was put first is not seen from outside, so a book is only worth something if both gave the same bytes. The replaying
    engine computes each block by itself, whatever comes before it and wherever the request resumed (`trace_engine_config()`),
    so they must; where they did not, that is counted.
    """

    pages: dict[str, PageDigests] = msgspec.field(default_factory=dict)
    #: Pages that were noted again with other bytes. The first note stays.
    contradictions: int = 0

    def note(self, tokens: Sequence[int], tokens_per_block: int, digests: Sequence[Sequence[bytes]]) -> None:
        """Note a sequence's pages. `digests`: per layer group, one for each whole block of `tokens`."""
        for name, pages in zip(block_names(tokens, tokens_per_block), zip(*digests, strict=True), strict=True):
            first = self.pages.setdefault(name, pages)
            self.contradictions += sum(ours != theirs for ours, theirs in zip(first, pages, strict=True))

    def known_blocks(self, names: Sequence[str]) -> int:
        """How many of these blocks, from the first on, are in the book."""
        return next((at for at, name in enumerate(names) if name not in self.pages), len(names))

    def differing(self, name: str, digests: PageDigests) -> int:
        """How many of a block's pages are not what is noted. All of them, if nothing is: nobody can have stored them."""
        noted = self.pages.get(name)
        return len(digests) if noted is None else sum(a != b for a, b in zip(noted, digests, strict=True))


def block_names(tokens: Sequence[int], tokens_per_block: int) -> list[str]:
    """The chain of hashes of a sequence's whole blocks: each names everything up to its end."""
    chain = Chain(scope_seed(EMPTY_SCOPE), tokens_per_block)
    chain.append(tokens)
    return [name.hex() for name in chain.hashes(0, len(tokens) // tokens_per_block)]
