"""Segments that are mapped before a test begins: a connector maps one when a load first saw a page in it."""

from collections.abc import Sequence
from typing import Any

import anyio

from akv.connector import Connector
from akv.values.pressure import Reads
from akv_testing.clock import settle
from akv_testing.segments import FakeHost, FakeSegment
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.traffic import TOKENS

#: Bytes of a segment with room for some prompts of a test.
ROOM = 1 << 12


def _prompt(server: FakeServer, number: int) -> tuple[int, ...]:
    first = 1_000_000 * (number + 1)
    return tuple(range(first, first + server.tokens_per_block + 1))


def put_into_each(server: FakeServer, segments: Sequence[FakeSegment]) -> None:
    """Store a prompt of one block in each segment. Each must have room for its pages. Leaves `store.places` as these."""
    for number, segment in enumerate(segments):
        server.store.places = [segment]
        server.put_in_store(_prompt(server, number))
    server.store.places = list(segments)


async def map_each(server: FakeServer, kv: Connector, segments: Sequence[FakeSegment]) -> None:
    """Load them, and return when each of the segments is mapped, or was refused."""
    for number in range(len(segments)):
        await settle()
        request, load, table = await server.load(kv, f"warm-{number}", _prompt(server, number))
        await load.wait()
        await request.cancel()
        server.free(table)
    await settle()


def server_on(
    host: FakeHost, *segments: FakeSegment, tokens: tuple[int, ...] = TOKENS, lease_s: float = 10.0, **arguments: Any
) -> FakeServer:
    """A server on this host, and the pages of a prompt in these segments."""
    server = FakeServer(store=FakeStore(anyio.current_time, lease_s=lease_s), segments=host, **arguments)
    put_into_each(server, segments)
    server.put_in_store(tokens)
    return server


async def all_mapped(server: FakeServer, kv: Connector) -> Reads:
    """Have every segment of the store mapped, and forget the calls. Returns what was read until then."""
    await map_each(server, kv, server.store.places)
    server.pool.calls.clear()
    return kv.pressure().reads


def read_since(kv: Connector, before: Reads) -> tuple[int, int, dict[str, int]]:
    """Pages that were read directly, bytes that were, and pages that were not by reason."""
    now = kv.pressure().reads
    staged = {reason: pages - before.staged.get(reason, 0) for reason, pages in now.staged.items()}
    return (
        now.direct_pages - before.direct_pages,
        now.direct_bytes - before.direct_bytes,
        {reason: pages for reason, pages in staged.items() if pages},
    )


def calls_of(server: FakeServer, operation: str) -> int:
    """How often the pool was asked for this operation."""
    return sum(call.operation == operation for call in server.pool.calls)
