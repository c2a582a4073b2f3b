"""Pages with something behind them: what another client of the pool did to a value is found, or shown not to be (S11)."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from akv import LoadFailed
from akv.plan.integrity import TRAILER_BYTES, trailer
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS
from akv_testing.window_server import WindowServer

pytestmark = pytest.mark.anyio

KINDS: dict[str, dict[str, Any]] = {
    "off": {},
    "checksum": {"integrity": "checksum"},
    "mac": {"integrity": "mac", "integrity_secret": "hunter2"},
}


async def loaded(server: FakeServer) -> tuple[str, list[tuple[int, int]]]:
    """Load the prompt: the reason if that failed, and the pages that hold what they do not stand for."""
    async with server.open() as kv:
        _, load, table = await server.load(kv, "r", TOKENS)
        try:
            await load.wait()
        except LoadFailed as failed:
            return failed.reason, []
        return "", server.wrong_pages(TOKENS, table, 0, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [4, 16])
async def test_S11_what_is_saved_is_found_and_loaded(kind: str, slots: int) -> None:
    server = FakeServer(slots=slots, **KINDS[kind])
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        await server.compute(kv, request, TOKENS, server.allocate(TOKENS))
        await request.finished()
    assert server.stored_blocks(TOKENS) == [0, 1, 2, 3]
    assert server.wrong_values() == []
    more = 0 if kind == "off" else TRAILER_BYTES
    sizes = [group.bytes_per_page + more for group in server.layout.groups]
    assert [len(server.store.value(keys[0]) or b"") for keys in server.keys_of(TOKENS)] == sizes
    assert await loaded(FakeServer(store=server.store, slots=slots, **KINDS[kind])) == ("", [])
    # Nobody with another kind, or another secret, sees any of it.
    for other in [{"integrity": "mac", "integrity_secret": "other"}, *(KINDS[name] for name in KINDS if name != kind)]:
        async with FakeServer(store=server.store, **other).open() as kv:
            assert (await kv.open_request("r", TOKENS).lookup()).tokens == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_S11_window_pages_pass_through_the_ring_with_their_trailers(kind: str) -> None:
    server = WindowServer(windows=((10, 3),), **KINDS[kind])
    async with server.open() as kv:
        await server.serve(kv, "a", TOKENS)
    assert server.wrong_values() == []
    other = WindowServer(windows=((10, 3),), store=server.store, **KINDS[kind])
    async with other.open() as kv:
        assert (await other.serve(kv, "b", TOKENS)).tokens == 16


def overwrite(server: FakeServer, kind: str, *, forge: str) -> str:
    """What another client of the pool can do to a value: returns its key."""
    group, block = 1, 2
    key = server.keys_of(TOKENS)[group][block]
    value = bytearray(server.store.value(key) or b"")
    if forge == "another key's value":
        other = server.keys_of(TOKENS)[group][0]
        value = bytearray(server.store.value(other) or b"")
    elif forge == "a longer value":
        value += b"x"
    elif forge == "a shorter value":
        del value[-1]
    else:
        value[0] ^= 1
    if forge == "a checksum" and kind != "off":
        value[-TRAILER_BYTES:] = trailer(key, value[:-TRAILER_BYTES])
    server.store.write(key, bytes(value))
    return key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forge", ["a bit", "another key's value", "a checksum"])
async def test_S11_checksum_and_mac_find_a_page_that_another_client_overwrote_and_off_does_not(kind: str, forge: str) -> None:
    server = FakeServer.warm(TOKENS, **KINDS[kind])
    key = overwrite(server, kind, forge=forge)
    with capture_logs() as events:
        reason, wrong = await loaded(server)
    told = [event for event in events if event["event"] == "akv.pages.damaged"]
    if kind == "off" or (kind == "checksum" and forge == "a checksum"):
        # Who can write a value can compute its checksum; without one nothing at all is seen.
        assert (reason, wrong, told) == ("", [(1, 2)], [])
        return
    assert (reason, wrong) == ("damaged", [])
    assert [event["pages"] for event in told] == [1]
    # Removed, lease or not: it would fail every load, and no put could replace it.
    assert server.store.value(key) is None
    assert "hunter2" not in str(events)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forge", ["a longer value", "a shorter value"])
async def test_S11_X4_a_value_of_another_size_fails_its_load_and_is_removed_where_pages_are_recognised(
    kind: str, forge: str
) -> None:
    server = FakeServer.warm(TOKENS, **KINDS[kind])
    key = overwrite(server, kind, forge=forge)
    with capture_logs() as events:
        assert await loaded(server) == ("wrong_size" if kind == "off" else "damaged", [])
    told = [event["pages"] for event in events if event["event"] == "akv.pages.damaged"]
    assert told == ([] if kind == "off" else [1])
    # Else it would fail every load, and no put could replace it.
    assert (server.store.value(key) is None) is (kind != "off")


async def test_S11_L8_what_was_damaged_is_computed_again_and_its_put_makes_it_whole() -> None:
    server = FakeServer.warm(TOKENS, **KINDS["mac"])
    overwrite(server, "mac", forge="a bit")
    async with server.open() as kv:
        request, load, table = await server.load(kv, "r", TOKENS)
        with pytest.raises(LoadFailed, match="damaged"):
            await load.wait()
        assert (await kv.open_request("s", TOKENS).lookup()).tokens == 8
        await server.compute(kv, request, TOKENS, table)
        await request.finished()
        assert (await kv.open_request("t", TOKENS).lookup()).tokens == 16
    assert server.wrong_values() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_S11_the_store_reaches_no_page_itself_where_a_trailer_belongs_behind_it(kind: str) -> None:
    server = FakeServer(host_pages=True, **KINDS[kind])
    async with server.open() as kv:
        reached = [region is not None for region in kv._halves.local_worker._regions]
    assert reached == [kind == "off"] * 2
