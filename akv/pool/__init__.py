"""The pool: Mooncake's store behind the pool port, the threads that call it, and an embedded master.

`open_pool()` is the way in. Importing this package loads no Mooncake; opening a pool does.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import metadata
from ipaddress import ip_address

import anyio
import msgspec

from akv.errors import NotOpenError, PoolError
from akv.observe import CONNECTOR_UNCLEAN_EXIT, POOL_CLOSE, POOL_OPEN, emit, step
from akv.pool.client import load_client_module
from akv.pool.client_log import CLIENT_LOG
from akv.pool.data_path import check_device, prove_data_path
from akv.pool.embedded import open_embedded_master
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.mooncake import MooncakePool
from akv.pool.reach import reach_master
from akv.pool.threads import ThreadRunner
from akv.pool.transfers import PROCESS_BUDGET, entries_allowed
from akv.settings import Settings, StoreSettings, prepare_client_environment

__all__ = ["MooncakePool", "ThreadRunner", "open_embedded_master", "open_pool"]

#: Seconds that the master may take to answer before this process joins its pool, and before it leaves.
JOIN_DEADLINE_S = 5.0
LEAVE_DEADLINE_S = 1.0


@asynccontextmanager
async def open_pool(settings: Settings) -> AsyncIterator[MooncakePool]:
    """Join the pool that checked `settings` name, or start one; leave it with the block, after every store call returned.

    The store's `setup()` and `close()` run here, on the loop's thread: they hold the interpreter lock from beginning to end,
    so a thread would keep nothing alive beside them (a fraction of a second to join, one to three to leave).

    On leaving, the store is closed only if no call is inside it and its master just answered. Otherwise nothing is closed: the
    store and its registered buffers stay alive to the end of the process, and the exit guard sees to that end (O6).

    The variables of the store's client are put in force before it is imported, its log is captured (`client.capture_log`), and
    the pool is used once, for a small value, before it is handed over.

    Raises SettingsError (fault of whoever configured this process: another connector of it runs with other client settings),
    DependencyError (fault of the installation), PoolError (fault of the deployment: address and likely cause), and
    NotOpenError in a process that was forked from one with an open store, where no client works.

    **Cancellation:** while joining, nothing is left behind. Leaving is shielded and bounded.
    """
    async with AsyncExitStack() as stack:
        if PROCESS_GUARD.forked_with_a_store:
            raise NotOpenError(
                "this process was forked from one that had a store open, so the store's client cannot work in it. "
                "Start workers with the 'spawn' method, or fork before the first connector opens."
            )
        in_force = prepare_client_environment(settings.client)
        load_client_module()  # Before a child starts, or anything else that would have to be undone.
        PROCESS_BUDGET.lower_to(entries_allowed(in_force))
        store = settings.store
        if settings.pool == "embedded":
            address = await stack.enter_async_context(open_embedded_master(settings.lease_s))
            store = msgspec.structs.replace(store, master_address=address)
        captured = settings.client.capture_log and CLIENT_LOG.hold()
        try:
            pool = await _join(settings, store)
        except BaseException:
            if captured:
                CLIENT_LOG.release()
            raise
        try:
            yield pool
        finally:
            # In a forked child the store is the parent's, and asyncio does not even know its loop.
            if not PROCESS_GUARD.forked_with_a_store:
                with anyio.CancelScope(shield=True):
                    # A store that stays open goes on logging, and its lines stay captured.
                    if await _leave(pool, settings.pool) and captured:
                        CLIENT_LOG.release()


async def _join(settings: Settings, store: StoreSettings) -> MooncakePool:
    """A pool that was set up and used once, with the guard. Undoes what it did if that fails."""
    with step(
        POOL_OPEN,
        pool=settings.pool,
        master_address=store.master_address,
        protocol=store.protocol,
        segment_bytes=store.segment_bytes,
        client_version=_client_version(),
    ) as fields:
        check_device(store)
        await _check_local_hostname(store)
        await reach_master(store.master_address, JOIN_DEADLINE_S)
        if settings.exit_guard:
            PROCESS_GUARD.arm(settings.shutdown_deadline_s)
        pool = set_up_store(store)
        PROCESS_GUARD.hold(pool)
        try:
            fields["data_path"] = await prove_data_path(pool, settings.namespace, store)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _leave(pool, settings.pool)
            raise
        return pool


def set_up_store(store: StoreSettings) -> MooncakePool:
    """Set a client up. Raises PoolError with the address and what usually is the cause."""
    client = load_client_module().MooncakeDistributedStore()
    code = client.setup(
        store.local_hostname,
        store.metadata_server,
        store.segment_bytes,
        store.local_buffer_bytes,
        store.protocol,
        store.device_name,
        store.master_address,
    )
    if code != 0:
        raise PoolError(
            f"the store could not join the pool at {store.master_address} (code {code}) with protocol {store.protocol!r}, "
            f"local hostname {store.local_hostname!r} and a segment of {store.segment_bytes} bytes. Likely causes: the "
            "segment does not fit in memory (store.segment_bytes), there is no such protocol or device here (store.protocol, "
            "store.device_name), or client and master are of versions that do not work together. The client told stderr why."
        )
    return MooncakePool(client, store.master_address, protocol=store.protocol, after_call=CLIENT_LOG.read)


async def _check_local_hostname(store: StoreSettings) -> None:
    """Refuse a name that cannot be resolved: the client would take it, and nobody could read what this process holds."""
    host = store.local_hostname.partition(":")[0]
    with suppress(ValueError):
        # A number needs no resolver, whose thread would stay to the end of the loop.
        ip_address(host)
        return
    try:
        await anyio.getaddrinfo(host, None)
    except OSError as error:
        raise PoolError(
            f"the local hostname {store.local_hostname!r} cannot be resolved ({error}), so no other process could reach the "
            "segment of this one. Set store.local_hostname to an address of this machine that the rest of the pool can reach."
        ) from error


async def _leave(pool: MooncakePool, kind: str) -> bool:
    """Close the store if that is safe; else leave it with the exit guard, which holds it already. Says whether it closed."""
    try:
        await reach_master(pool.address, LEAVE_DEADLINE_S)
        answers = True
    except PoolError:
        answers = False
    # Beside a call, closing would crash the process; without a master it would hold the interpreter lock for up to a minute.
    if pool.calls_running or not answers:
        emit(
            CONNECTOR_UNCLEAN_EXIT,
            outstanding_calls=pool.calls_running,
            buffers=pool.buffers_registered,
            deadline_s=LEAVE_DEADLINE_S,
        )
        return False
    with step(POOL_CLOSE, pool=kind):
        pool.close()
    PROCESS_GUARD.release(pool)
    return True


def _client_version() -> str:
    """The wheel that brought the client, and its version; several wheels bring the same package."""
    names = metadata.packages_distributions().get("mooncake", [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names))) or "unknown"
