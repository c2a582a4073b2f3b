"""The chain of block hashes of one token sequence (K1, K2, K5, K6, K7).

A hash covers everything before it, so one hash names a whole prefix. Nothing here depends on the process (no `hash()`, no
dict order): another server computes the same bytes, or nothing is shared.
`akv/plan/identity.py` makes the chains of a server.
"""

import operator
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import MappingProxyType
from typing import SupportsIndex

from akv.errors import TokenError
from akv.plan.media import frame
from akv.plan.tokens import TOKEN_BYTES, Tokens, encode_confirmed, first_difference
from akv.values.scope import Lora, Media, Scope

#: Bytes of a block's hash (K1).
HASH_BYTES = 16
#: What the seed is digested with again where blocks are hashed over tokens behind them (K2).
_LOOKAHEAD = b"prompt-lookahead"
#: Token bytes that one call hashes when the caller must give the loop a chance: about 0.25 ms on a present core, so that one
#: three times slower still keeps below the millisecond of L3.
_SLICE_BYTES = 192 * 1024
#: What a block costs besides its bytes, in bytes that cost as much: hashing 0 bytes takes as long as another 256.
_BLOCK_OVERHEAD_BYTES = 256

# Copying a fresh state is a fifth cheaper than building one, and there is one per block.
_FRESH = blake2b(digest_size=HASH_BYTES)
_NO_MEDIA: Mapping[int, bytes] = MappingProxyType({})


def hash_state(secret: bytes = b"") -> blake2b:
    """H of K1 before its first byte, keyed by `secret` if there is one (X2): at most 64 bytes, blake2b's own bound."""
    return blake2b(digest_size=HASH_BYTES, key=secret)


def whole_blocks(tokens: int, tokens_per_block: int, lookahead: int = 0) -> int:
    """The chain length p of a sequence of `tokens` tokens: floor((n - L)/T), and none where there are fewer than L (K2)."""
    return max(0, tokens - lookahead) // tokens_per_block


def scope_seed(scope: Scope, *, media: Sequence[Media] = (), lookahead: int = 0, fresh: blake2b = _FRESH) -> bytes:
    """What the first block of every chain of this scope is hashed onto, 16 bytes: scopes share no hash (K1, K5).

    `media`: those that count from the first block on, in TensorRT-LLM's way; by default the scope's media are no part of it.
    `lookahead` is L (K2), `fresh` the state that every hash begins with (X2). Raises TokenError (fault of the caller of this
    request) for a scope that cannot be hashed. The salt is not quoted, and neither it nor the secret is a variable here: those
    of a traceback are logged by many servers (X6).
    """
    state = fresh.copy()
    # Not `scope.salt or ""`: a tenant's number is no salt, and that of tenant 0 would pass for none.
    state.update(frame(b"" if scope.salt is None else _utf8("salt", scope, "salt")))
    state.update(frame(b"" if scope.lora is None else _encoded_lora(scope.lora)))
    for item in media:
        state.update(frame(item.digest))
    if not lookahead:
        return state.digest()
    again = fresh.copy()
    again.update(state.digest() + _LOOKAHEAD + struct.pack("<q", lookahead))
    return again.digest()


def _encoded_lora(lora: Lora) -> bytes:
    if not isinstance(lora, Lora):
        raise TokenError(f"the lora of the request's scope is an akv.Lora, not a {type(lora).__name__}; nothing was opened")
    number = None if isinstance(lora.id, bool) or not isinstance(lora.id, SupportsIndex) else operator.index(lora.id)
    if number is None or not -(2**63) <= number < 2**63:
        raise TokenError("the id of the scope's LoRA adapter is an integer of 64 bits; nothing was opened")
    return struct.pack("<q", number) + _utf8("revision of the LoRA adapter", lora, "revision")


def _utf8(what: str, owner: Scope | Lora, field: str) -> bytes:
    """The bytes of a field's text, which may be the salt: it is neither quoted nor a variable."""
    if not isinstance(getattr(owner, field), str):
        kind = type(getattr(owner, field)).__name__
        raise TokenError(f"the {what} of the request's scope is text, not a {kind}; nothing was opened")
    with suppress(UnicodeEncodeError):
        encoded: bytes = getattr(owner, field).encode()
        return encoded
    raise TokenError(f"the {what} of the request's scope is not valid Unicode (a lone surrogate); nothing was opened")


class Chain:
    """The confirmed tokens of one request, and the hashes of its whole blocks, computed on demand and kept.

    Tokens are encoded when they are given, hashes when they are asked for: a request that computes everything itself and saves
    nothing never pays for hashing. Hashing is sliced (`hash_up_to`), because a prompt of 200,000 tokens takes milliseconds.
    """

    __slots__ = ("_encoded", "_fresh", "_hashes", "_media", "_seed", "lookahead", "tokens_per_block")

    def __init__(
        self,
        seed: bytes,
        tokens_per_block: int,
        *,
        lookahead: int = 0,
        media: Mapping[int, bytes] = _NO_MEDIA,
        fresh: blake2b | None = None,
    ) -> None:
        """Start an empty chain on a scope's seed (`scope_seed`). `tokens_per_block` is T.

        `lookahead` is L: a block is hashed over the L tokens behind it too, and has no hash before they are there (K2).
        `media`: for blocks in which media begin to matter the bytes that follow their tokens (`akv.plan.media`). `fresh` is
        the state that every hash begins with, `hash_state()` by default.
        """
        self._seed = seed
        self.tokens_per_block = tokens_per_block
        #: L.
        self.lookahead = lookahead
        self._media = media
        self._fresh = _FRESH if fresh is None else fresh
        self._encoded = bytearray()
        self._hashes: list[bytes] = []

    @property
    def length(self) -> int:
        """Confirmed tokens so far."""
        return len(self._encoded) // TOKEN_BYTES

    @property
    def hashable_blocks(self) -> int:
        """Blocks that have a hash so far: the whole ones, with their lookahead behind them."""
        return whole_blocks(self.length, self.tokens_per_block, self.lookahead)

    @property
    def slice_blocks(self) -> int:
        """Blocks to hash at a stretch so that the loop is held for less than a millisecond (L3): `at_most` of `hash_up_to`."""
        return max(1, _SLICE_BYTES // (self._hashed_bytes + _BLOCK_OVERHEAD_BYTES))

    @property
    def start(self) -> bytes | None:
        """What two chains that can share hashes have in common: seed, T, all of the first block. None below one block."""
        if not self.hashable_blocks:
            return None
        # The seed covers scope and lookahead. Media of the first block are compared by `adopt`, as those of the others are.
        return self._seed + struct.pack("<Q", self.tokens_per_block) + self._encoded[: self._hashed_bytes]

    @property
    def _hashed_bytes(self) -> int:
        """Bytes of tokens in one block's hash."""
        return (self.tokens_per_block + self.lookahead) * TOKEN_BYTES

    def adopt(self, other: "Chain") -> None:
        """Take over the hashes of the blocks that this chain shares with `other`, as far as `other` has hashed them (K7).

        Tokens and media are compared. Raises ValueError for a chain of another seed, block size or lookahead (a fault of akv).
        """
        mine, theirs = (
            (self._seed, self.tokens_per_block, self.lookahead),
            (other._seed, other.tokens_per_block, other.lookahead),
        )
        if mine != theirs:
            raise ValueError("chains of different scopes, block sizes or lookaheads share no hash")
        size, ahead = self.tokens_per_block * TOKEN_BYTES, self.lookahead * TOKEN_BYTES
        known = len(self._hashes)
        blocks = min(self.hashable_blocks, len(other._hashes), self._media_alike(other))
        if blocks > known:
            # From the first block that has no hash here: those before are this chain's own, and equal or not they are right.
            # But a hash covers everything before it, so they have to be equal for the others to be of use.
            if known and self._hashes[-1] != other._hashes[known - 1]:
                return
            alike = _shared_bytes(self._encoded, other._encoded, known * size, blocks * size + ahead, size)
            # Of a block that parts within its lookahead nothing is shared.
            self._hashes += other._hashes[known : max(known, (alike - ahead) // size)]

    def _media_alike(self, other: "Chain") -> int:
        """The first block in which the media of two chains differ; beyond every block if they are the same."""
        if not (self._media or other._media):
            return len(other._hashes)
        differ = (b for b in self._media.keys() | other._media.keys() if self._media.get(b) != other._media.get(b))
        return min(differ, default=len(other._hashes))

    def is_prefix_of(self, other: "Chain") -> bool:
        """Whether every hash that this chain has is also one of `other`'s, and none of its whole blocks is without one."""
        own = len(self._hashes)
        return own == self.hashable_blocks <= len(other._hashes) and (not own or self._hashes[-1] == other._hashes[own - 1])

    def append(self, tokens: Tokens) -> None:
        """Append tokens that the engine has confirmed. A trailing run of `PLACEHOLDER` (-1) is not kept.

        The next call goes on at `length`, so the tokens that take the placeholders' places are appended when they are known,
        and a block that still has one in it has no hash (K6).

        Raises TokenError, naming the position in the whole sequence and never the value, as `encode_confirmed` does. All or
        nothing: no token of a refused call is kept.
        """
        encoded = encode_confirmed(tokens, self.length)
        if self._encoded:
            self._encoded += encoded
        else:
            # A prompt, which is long: taken as it is where it can be.
            self._encoded = encoded if isinstance(encoded, bytearray) else bytearray(encoded)

    def observe(self, sequence: Tokens) -> None:
        """Take the whole sequence once more, as a resumed request gives it: only what is new at its end is appended.

        What the chain has seen is compared, not assumed (K7): serving a page to a sequence that merely has the right length
        would be a wrong answer and not a slow one. Raises TokenError (fault of the caller of this request), all or nothing,
        for a sequence with fewer confirmed tokens than the chain has seen (K6), for one that differs in a token already seen
        (the first such position is named), and for whatever `append` refuses.
        """
        encoded = encode_confirmed(sequence, 0)
        if len(encoded) < len(self._encoded):
            raise TokenError(
                f"the sequence has {len(encoded) // TOKEN_BYTES} confirmed tokens, but {self.length} of it were seen before; "
                "nothing was appended"
            )
        different = first_difference(self._encoded, encoded[: len(self._encoded)])
        if different is not None:
            raise TokenError(f"token at position {different}: it differs from the one seen there before; nothing was appended")
        self._encoded += encoded[len(self._encoded) :]

    def hash_up_to(self, blocks: int, at_most: int | None = None) -> int:
        """Hash towards the first `blocks` blocks, `at_most` more in this call (None: all); return how many have a hash.

        Call it with `at_most=chain.slice_blocks` until it returns at least `blocks`, with a checkpoint in between. The answer
        exceeds `blocks` where more were hashed before. Raises ValueError if the sequence has fewer whole blocks (a fault of
        akv: such a loop would never end).
        """
        if blocks > self.hashable_blocks:
            raise ValueError(f"{blocks} blocks asked of a chain that has {self.hashable_blocks} whole ones")
        first = len(self._hashes)
        end = blocks if at_most is None else min(blocks, first + at_most)
        size, hashed = self.tokens_per_block * TOKEN_BYTES, self._hashed_bytes
        previous = self._hashes[-1] if self._hashes else self._seed
        encoded, append, fresh, media = self._encoded, self._hashes.append, self._fresh.copy, self._media
        for block in range(first, end):
            state = fresh()
            state.update(previous)
            state.update(encoded[block * size : block * size + hashed])
            if block in media:
                state.update(media[block])
            previous = state.digest()
            append(previous)
        return len(self._hashes)

    def hashes(self, lo: int, hi: int) -> list[bytes]:
        """The hashes of blocks [lo, hi), 16 bytes each, computed first where they are not known yet.

        Raises ValueError as `hash_up_to` does.
        """
        self.hash_up_to(hi)
        return self._hashes[lo:hi]


def _shared_bytes(one: bytearray, other: bytearray, start: int, end: int, block: int) -> int:
    """Where two encodings that are equal below `start` part, at the latest `end`, rounded down to whole blocks.

    Compared in strides that grow while they are equal and shrink to one block where they are not, because most sequences
    either part early or are equal to the end.
    """
    # Each comparison copies both stretches. Short ones come from memory that is at hand; a megabyte is fetched page by page.
    longest = max(1, 64 * 1024 // block) * block
    at, stride = start, min(16 * block, longest)
    while at < end:
        stop = min(at + stride, end)
        if one[at:stop] == other[at:stop]:
            at, stride = stop, min(4 * stride, longest)
        elif stop - at <= block:
            break
        else:
            stride = max(block, (stop - at) // block // 8 * block)
    return at
