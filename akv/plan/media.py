"""What media add to the hashes of a sequence: which block each counts in first, and the bytes that it adds there (K1)."""

import operator
import struct
from collections.abc import Mapping, Sequence
from typing import NoReturn

from akv.errors import TokenError
from akv.values.scope import DIGEST_BYTES, Media

#: Positions and counts are hashed as eight bytes.
_LARGEST = 2**63 - 1


def frame(data: bytes) -> bytes:
    """Length first, so that no two lists of fields have the same bytes."""
    return struct.pack("<I", len(data)) + data


def check_media(media: object) -> tuple[Media, ...]:
    """The media of a scope, as plain values: each of them whole, in the order of their positions, none overlapping another.

    Raises TokenError (fault of the caller of this request) naming the first item that is not, by its place in the list, and
    never its digest.
    """
    # An empty text would pass for no media, whatever it was to say.
    if not isinstance(media, Sequence) or isinstance(media, str | bytes) or not all(isinstance(item, Media) for item in media):
        raise TokenError(
            f"the media of a scope are a tuple of akv.Media, not {_kind(media)}; nothing was opened. Say () where there are "
            "none, and None where nobody knows their digests"
        )
    checked: list[Media] = []
    for index, item in enumerate(media):
        if not isinstance(item.digest, bytes) or len(item.digest) != DIGEST_BYTES:
            _refuse(index, f"its digest is {DIGEST_BYTES} bytes, not {_kind(item.digest)}")
        position, tokens = _whole(index, "position", item.position, 0), _whole(index, "tokens", item.tokens, 1)
        before = checked[-1] if checked else None
        if before is not None and position < before.position + before.tokens:
            why = "overlaps" if position >= before.position else "comes before"
            _refuse(index, f"it begins at {position} and {why} the item before it ({before.position}, {before.tokens} tokens)")
        checked.append(Media(digest=item.digest, position=position, tokens=tokens))
    return tuple(checked)


def check_inside(media: Sequence[Media], length: int) -> None:
    """Refuse media that reach beyond the `length` confirmed tokens of their prompt. They are in order. As `check_media`."""
    for index, item in enumerate(media):
        if item.position + item.tokens > length:
            end = item.position + item.tokens
            _refuse(index, f"its tokens end at {end}, and the prompt has {length} confirmed ones")


def media_frames(media: Sequence[Media], tokens_per_block: int, lookahead: int = 0) -> Mapping[int, bytes]:
    """By block, the bytes that follow its tokens in its hash: each item in the first block whose hash covers its first token.

    That is the block with its position in [bT, (b + 1)T + L), and an earlier one has none of the item's tokens in its hash. So
    a prefix that ends before an item is shared by sequences that go on with different ones. `media` are checked and in order.
    """
    frames: dict[int, bytes] = {}
    for item in media:
        # The first b with position < (b + 1)T + L.
        block = max(0, (item.position - lookahead) // tokens_per_block)
        frames[block] = frames.get(block, b"") + frame(item.digest + struct.pack("<qq", item.position, item.tokens))
    return frames


def _whole(index: int, name: str, number: object, least: int) -> int:
    """A number of the engine's, numpy's integers included, as a plain one."""
    try:
        whole = operator.index(number)  # type: ignore[arg-type]  # anything else raises
    except TypeError:
        _refuse(index, f"its {name} is an integer, not {_kind(number)}")
    if isinstance(number, bool) or not least <= whole <= _LARGEST:
        _refuse(index, f"its {name} is {number}; it is at least {least}, and fits into 63 bits")
    return whole


def _kind(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"


def _refuse(index: int, why: str) -> NoReturn:
    raise TokenError(f"media[{index}] of the request's scope: {why}; nothing was opened") from None
