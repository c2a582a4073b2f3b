"""The trailer behind a page: what it finds, and how kinds are kept apart (S11)."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.plan.integrity import TRAILER_BYTES, size_suffix, trailer, trailer_bytes

KEY = "akv1/m/w1r0/lg0/t4b8-c/00"


@given(st.text(max_size=9), st.binary(max_size=40), st.binary(max_size=64))
def test_S11_a_trailer_equals_the_naive_model(key: str, page: bytes, secret: bytes) -> None:
    encoded = key.encode()
    naive = hashlib.blake2b(struct.pack("<I", len(encoded)) + encoded + page, digest_size=16, key=secret).digest()
    assert trailer(key, page, secret) == trailer(key, memoryview(bytearray(page)), secret) == naive
    assert len(naive) == TRAILER_BYTES


def test_S11_a_bit_of_the_page_its_key_and_the_secret_all_count() -> None:
    page = bytes(8)
    trailers = {
        trailer(KEY, page),
        trailer(KEY, bytes(7) + b"\x01"),
        trailer(KEY + "1", page),
        # No byte can move from the key into the page.
        trailer(KEY[:-1], b"0" + page),
        trailer(KEY, page, b"a"),
        trailer(KEY, page, b"b"),
    }
    assert len(trailers) == 6


@pytest.mark.parametrize(
    ("integrity", "secret", "more", "suffix"),
    [("off", b"", 0, ""), ("checksum", b"", 16, "-c"), ("mac", b"a", 16, "-m333fcb4e"), ("mac", b"", 16, "-m786a02f7")],
)
def test_S11_kinds_and_secrets_never_share_a_key(integrity: str, secret: bytes, more: int, suffix: str) -> None:
    assert (trailer_bytes(integrity), size_suffix(integrity, secret)) == (more, suffix)
