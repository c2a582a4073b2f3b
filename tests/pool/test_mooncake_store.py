"""The adapter in front of a real store: what every pool promises, and answers that a healthy master can be made to give."""

from collections.abc import Callable, Iterator

import pytest

from akv.flow.sealing import SealedPool
from akv.plan.integrity import TRAILER_BYTES
from akv.pool import MooncakePool
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState
from akv_testing.conformance.pool import PoolConformance

pytestmark = pytest.mark.mooncake

PAGE = 1000
POISON = 0xEE


class TestMooncakePool(PoolConformance):
    """Its fixtures stand in conftest.py."""


@pytest.fixture
def buffer(pool: MooncakePool, memory: Callable[..., HostBuffer]) -> Iterator[HostBuffer]:
    """Registered memory for eight pages, poisoned."""
    made = memory(8 * PAGE, POISON)
    pool.register(made)
    yield made
    pool.unregister(made)


def fill(buffer: HostBuffer, offset: int, value: int, size: int = PAGE) -> bytes:
    data = bytes((value + index) % 256 for index in range(size))
    buffer.view()[offset : offset + size] = data
    return data


def test_the_codes_of_healthy_answers(pool: MooncakePool, buffer: HostBuffer, new_key: Callable[[], str]) -> None:
    key, absent = new_key(), new_key()
    assert pool.put([key], buffer, [0], [PAGE]) == [KeyAnswer(KeyState.OK, 0)]
    assert pool.probe([key, absent]) == [KeyAnswer(KeyState.OK, 1), KeyAnswer(KeyState.MISSING, 0)]
    answers = pool.get([key, absent], buffer, [0, PAGE], [PAGE, PAGE])
    assert answers == [KeyAnswer(KeyState.OK, PAGE), KeyAnswer(KeyState.MISSING, -704)]


@pytest.mark.parametrize(("asked", "code"), [(PAGE - 1, -600), (1, -600), (PAGE + 1, PAGE), (2 * PAGE, PAGE)])
def test_D3_a_value_of_another_size_is_seen_and_no_neighbour_is_written(
    asked: int, code: int, pool: MooncakePool, buffer: HostBuffer, new_key: Callable[[], str]
) -> None:
    key = new_key()
    fill(buffer, 0, 1)
    pool.put([key], buffer, [0], [PAGE])
    assert pool.get([key], buffer, [4 * PAGE], [asked]) == [KeyAnswer(KeyState.WRONG_SIZE, code)]
    view = buffer.view()
    assert set(view[PAGE : 4 * PAGE]) == {POISON}
    assert set(view[4 * PAGE + asked :]) == {POISON}


@pytest.mark.parametrize("secret", [b"", b"s"])
def test_S11_a_page_that_another_client_overwrote_is_found_and_removed(
    secret: bytes, pool: MooncakePool, buffer: HostBuffer, new_key: Callable[[], str]
) -> None:
    sealed, keys = SealedPool(pool, secret), [new_key(), new_key()]
    pages = [fill(buffer, 0, 1), fill(buffer, 2 * PAGE, 2)]
    assert sealed.put(keys, buffer, [0, 2 * PAGE], [PAGE, PAGE]) == [KeyAnswer(KeyState.OK, 0)] * 2
    pieces = ([4 * PAGE, 6 * PAGE], [PAGE, PAGE])
    assert [answer.state for answer in sealed.get(keys, buffer, *pieces)] == [KeyState.OK] * 2
    assert [bytes(buffer.view()[at : at + PAGE]) for at in pieces[0]] == pages
    # Another client takes the first value's place, trailer and all but for one bit of the page.
    pool.remove(keys[:1])
    buffer.view()[0] ^= 1
    pool.put(keys[:1], buffer, [0], [PAGE + TRAILER_BYTES])
    assert [answer.state for answer in sealed.get(keys, buffer, *pieces)] == [KeyState.DAMAGED, KeyState.OK]
    assert [answer.state for answer in sealed.probe(keys)] == [KeyState.MISSING, KeyState.OK]


def test_S5_of_a_key_twice_in_one_call_the_first_piece_is_stored_whatever_the_sizes(
    pool: MooncakePool, buffer: HostBuffer, new_key: Callable[[], str]
) -> None:
    key = new_key()
    first = fill(buffer, 0, 1)
    fill(buffer, PAGE, 77, 2 * PAGE)
    assert [answer.state for answer in pool.put([key, key], buffer, [0, PAGE], [PAGE, 2 * PAGE])] == [KeyState.OK] * 2
    assert pool.get([key], buffer, [4 * PAGE], [PAGE]) == [KeyAnswer(KeyState.OK, PAGE)]
    assert bytes(buffer.view()[4 * PAGE : 5 * PAGE]) == first


def test_an_empty_key_is_never_there(pool: MooncakePool, buffer: HostBuffer) -> None:
    assert pool.put([""], buffer, [0], [PAGE]) == [KeyAnswer(KeyState.REFUSED, -600)]
    assert pool.probe([""])[0].state is not KeyState.OK
    assert pool.get([""], buffer, [0], [PAGE])[0].state is not KeyState.OK
