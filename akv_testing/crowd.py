"""Many clients at once, and trouble beside them: calls that hang for a while, fail, and lose their keys."""

from collections.abc import Awaitable, Callable, Sequence
from random import Random

import anyio
from anyio import create_memory_object_stream, create_task_group

from akv.ports.calls import CallKind
from akv.ports.pool import KeyState
from akv_testing.server import FakeServer

#: Scripted answers that wait at most. Where requests wait for a retry or a back-off, trouble would pile up for the next.
_MOST_SCRIPTS = 4


async def serve_crowd(
    requests: int, clients: int, serve: Callable[[int], Awaitable[object]], beside: Callable[[], Awaitable[object]]
) -> None:
    """Have so many clients serve requests number 0, 1, ... in turn; `beside` runs until the last of them has ended."""
    send, receive = create_memory_object_stream[int](requests)
    for number in range(requests):
        send.send_nowait(number)
    send.close()

    async def client() -> None:
        async with receive.clone() as numbers:
            async for number in numbers:
                await serve(number)

    async def until_cancelled() -> None:
        await beside()

    async with create_task_group() as group:
        async with create_task_group() as crowd:
            for _ in range(clients):
                crowd.start_soon(client)
            group.start_soon(until_cancelled)
        group.cancel_scope.cancel()
    receive.close()


async def make_trouble(random: Random, servers: Sequence[FakeServer]) -> None:
    """For one of these processes after the other, until cancelled."""
    while True:
        server = random.choice(servers)
        kind = random.choice([CallKind.GET, CallKind.PUT, CallKind.PROBE, CallKind.SNAPSHOT])
        gate = server.runner.hold(kind, after_body=random.random() < 0.5)
        if len(server.pool._scripts) < _MOST_SCRIPTS:
            server.pool.answer("put", KeyState.NO_SPACE, skip=random.randrange(9))
            server.pool.answer("get", KeyState.MISSING, skip=random.randrange(30))
        present = server.store.keys()
        for key in random.sample(present, min(3, len(present))):
            server.store.evict(key)
        try:
            await anyio.sleep(random.random() / 20)
        finally:
            gate.release()
