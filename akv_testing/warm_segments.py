"""Segments that are mapped before a test begins: a connector maps one when a load first saw a page in it."""

from collections.abc import Sequence

from akv.connector import Connector
from akv_testing.clock import settle
from akv_testing.segments import FakeSegment
from akv_testing.server import FakeServer


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
