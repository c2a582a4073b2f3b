"""The chain of block hashes of one token sequence (K1, K5, K6, K7).

A hash covers everything before it, so one hash names a whole prefix. Nothing here depends on the process (no `hash()`, no
dict order): another server computes the same bytes, or nothing is shared.
"""

import struct
from hashlib import blake2b

from akv.errors import TokenError
from akv.plan.tokens import TOKEN_BYTES, Tokens, encode_confirmed, first_difference
from akv.values.scope import Scope

#: Bytes of a block's hash (K1).
HASH_BYTES = 16
#: Token bytes that one call hashes when the caller must give the loop a chance: about 0.25 ms on a present core, so that one
#: three times slower still keeps below the millisecond of L3.
_SLICE_BYTES = 192 * 1024
#: What a block costs besides its bytes, in bytes that cost as much: hashing 0 bytes takes as long as another 256.
_BLOCK_OVERHEAD_BYTES = 256

# Copying a fresh state is a fifth cheaper than building one, and there is one per block.
_FRESH = blake2b(digest_size=HASH_BYTES)


def _frame(data: bytes) -> bytes:
    """Length first, so that no two lists of fields have the same bytes."""
    return struct.pack("<I", len(data)) + data


def scope_seed(scope: Scope) -> bytes:
    """What the first block of every chain of this scope is hashed onto, 16 bytes: scopes share no hash (K1, K5).

    Raises TokenError (fault of the caller of this request) if the salt cannot be written as UTF-8. The salt is not quoted.
    """
    try:
        salt = (scope.salt or "").encode()
    except UnicodeEncodeError:
        raise TokenError("the salt of the request's scope is not valid Unicode (a lone surrogate)") from None
    return blake2b(_frame(salt) + _frame(b""), digest_size=HASH_BYTES).digest()


class Chain:
    """The confirmed tokens of one request, and the hashes of its whole blocks, computed on demand and kept.

    Tokens are encoded when they are given, hashes when they are asked for: a request that computes everything itself and saves
    nothing never pays for hashing. Hashing is sliced (`hash_up_to`), because a prompt of 200,000 tokens takes milliseconds.
    """

    __slots__ = ("_encoded", "_hashes", "_seed", "tokens_per_block")

    def __init__(self, seed: bytes, tokens_per_block: int) -> None:
        """Start an empty chain on a scope's seed (`scope_seed`). `tokens_per_block` is T."""
        self._seed = seed
        self.tokens_per_block = tokens_per_block
        self._encoded = bytearray()
        self._hashes: list[bytes] = []

    @property
    def length(self) -> int:
        """Confirmed tokens so far."""
        return len(self._encoded) // TOKEN_BYTES

    @property
    def hashable_blocks(self) -> int:
        """Whole blocks so far: those that have a hash."""
        return self.length // self.tokens_per_block

    @property
    def slice_blocks(self) -> int:
        """Blocks to hash at a stretch so that the loop is held for less than a millisecond (L3): `at_most` of `hash_up_to`."""
        return max(1, _SLICE_BYTES // (self.tokens_per_block * TOKEN_BYTES + _BLOCK_OVERHEAD_BYTES))

    @property
    def start(self) -> bytes | None:
        """What two chains that can share hashes have in common: seed, T, the first block. None below one block."""
        size = self.tokens_per_block * TOKEN_BYTES
        if len(self._encoded) < size:
            return None
        return self._seed + struct.pack("<Q", self.tokens_per_block) + self._encoded[:size]

    def adopt(self, other: "Chain") -> None:
        """Take over the hashes of the blocks that this chain shares with `other`, as far as `other` has hashed them (K7).

        The tokens are compared. Raises ValueError for a chain of another seed or block size (a fault of akv).
        """
        if (self._seed, self.tokens_per_block) != (other._seed, other.tokens_per_block):
            raise ValueError("chains of different scopes or block sizes share no hash")
        size = self.tokens_per_block * TOKEN_BYTES
        known = len(self._hashes)
        blocks = min(self.hashable_blocks, len(other._hashes))
        if blocks > known:
            # From the first block that has no hash here: those before are this chain's own, and equal or not they are right.
            # But a hash covers everything before it, so they have to be equal for the others to be of use.
            if known and self._hashes[-1] != other._hashes[known - 1]:
                return
            shared = _shared_bytes(self._encoded, other._encoded, known * size, blocks * size, size) // size
            self._hashes += other._hashes[known:shared]

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
        size = self.tokens_per_block * TOKEN_BYTES
        previous = self._hashes[-1] if self._hashes else self._seed
        encoded, append, fresh = self._encoded, self._hashes.append, _FRESH.copy
        for at in range(first * size, end * size, size):
            state = fresh()
            state.update(previous)
            state.update(encoded[at : at + size])
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
