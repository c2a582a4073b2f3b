"""The trailer behind a stored page, by which a page is recognised that is not the one which its key names (S11)."""

from hashlib import blake2b

from akv.plan.media import frame

#: Bytes of the trailer, behind the page.
TRAILER_BYTES = 16
#: Hex digits of a secret's hash in a key: enough to tell secrets apart, too few to find one by.
_SECRET_DIGITS = 8


def trailer_bytes(integrity: str) -> int:
    """How much longer than its page a stored value is."""
    return 0 if integrity == "off" else TRAILER_BYTES


def size_suffix(integrity: str, secret: bytes = b"") -> str:
    """What stands behind the size in a key, so that kinds and secrets never share one: "", "-c", or "-m" and eight digits."""
    if integrity == "off":
        return ""
    if integrity == "checksum":
        return "-c"
    return f"-m{blake2b(secret).hexdigest()[:_SECRET_DIGITS]}"


def trailer(key: str, page: bytes | bytearray | memoryview, secret: bytes = b"") -> bytes:
    """The trailer of a page under this key, 16 bytes: a checksum, or with a secret (at most 64 bytes) a MAC.

    Seeded with the key, so that one page's value under another page's key is found out. About 1 ms per MiB; hashlib lets go of
    the interpreter lock meanwhile. Call it off the loop.
    """
    state = blake2b(frame(key.encode()), digest_size=TRAILER_BYTES, key=secret)
    state.update(page)
    return state.digest()
