"""One client of the store for all connectors of a loop that join the same pool in the same way (O8).

A client lends memory, has about 25 threads and a connection to everybody, so two connectors of one process (of a model and of
its drafter, say) have one between them. It is set up for the first of them and closed by the last. Pools are told apart by
their store settings, the master's address among them: whoever lends another amount of memory joins for itself.

Connectors of one event loop share, since whoever joins waits for whoever is joining. A loop in another thread has clients of
its own: that is safe, and both loops stand still while one of them sets a client up or closes it (O7). Sharing across loops
was rejected: the last user would close, on its own loop, what another loop is about to join.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import msgspec
from anyio import CancelScope, Lock
from anyio.lowlevel import RunVar

from akv.pool.exit_guard import PROCESS_GUARD
from akv.settings import StoreSettings

Client = TypeVar("Client")


class ClientLife(msgspec.Struct, Generic[Client], frozen=True):
    """What is done with a client."""

    #: Joins the pool for the first user. What it raises, and what `again` raises, is the user's.
    join: Callable[[], Awaitable[Client]]
    #: The client is there already, for another user.
    again: Callable[[Client], Awaitable[None]]
    #: Asks, with a deadline, whether the client may be closed now.
    may_close: Callable[[Client], Awaitable[bool]]
    #: Closes it, or leaves it open for good; does not wait. Called once.
    close: Callable[[Client, bool], None]


class _Shared:
    """A client, and the blocks that use it or are about to."""

    def __init__(self) -> None:
        self.users = 0
        self.client: Any = None
        #: Joining and leaving take turns: neither is done at once.
        self.turn = Lock()


#: The clients of each event loop, by their settings.
_CLIENTS: RunVar[dict[StoreSettings, _Shared]] = RunVar("akv_store_clients")


@asynccontextmanager
async def shared_client(store: StoreSettings, life: ClientLife[Client]) -> AsyncIterator[Client]:
    """The client of these settings, for a block. The last block closes it.

    **Cancellation:** while joining, nothing is kept. Leaving is shielded, and takes as long as `may_close`.
    """
    clients = _CLIENTS.get(None)
    if clients is None:
        _CLIENTS.set(clients := {})
    shared = clients.setdefault(store, _Shared())
    shared.users += 1
    try:
        async with shared.turn:
            if shared.client is None:
                shared.client = await life.join()
            else:
                await life.again(shared.client)
        yield shared.client
    finally:
        shared.users -= 1
        # In a forked child the store is the parent's, and asyncio does not even know its loop.
        if not PROCESS_GUARD.forked_with_a_store:
            with CancelScope(shield=True):
                await _left(shared, life)
            if shared.client is None and not shared.users:
                clients.pop(store, None)


async def _left(shared: _Shared, life: ClientLife[Client]) -> None:
    """One user has gone. If it was the last one, close the client: once, whoever comes and goes meanwhile."""
    async with shared.turn:
        if shared.users or shared.client is None:
            return
        may_close = await life.may_close(shared.client)
        # Somebody may have come while the pool was asked.
        if not shared.users:
            client, shared.client = shared.client, None
            life.close(client, may_close)
