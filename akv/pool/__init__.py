"""The pool: Mooncake's store behind the pool port, the threads that call it, and an embedded master.

`open_pool()` is the way in. Importing this package loads no Mooncake; opening a pool does.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import metadata
from ipaddress import ip_address
from typing import NamedTuple

import anyio
import msgspec

from akv.errors import NotOpenError, PoolError
from akv.observe import CONNECTOR_UNCLEAN_EXIT, POOL_CLOSE, POOL_OPEN, POOL_SHARED, SEGMENT_PRIVATE, emit, step
from akv.pool.board import posting
from akv.pool.client import load_client_module
from akv.pool.client_log import CLIENT_LOG
from akv.pool.data_path import check_device, prove_data_path
from akv.pool.embedded import open_embedded_master
from akv.pool.exit_guard import PROCESS_GUARD
from akv.pool.host_segments import RegisteredSegments
from akv.pool.mooncake import MooncakePool
from akv.pool.own_endpoint import publish_segments
from akv.pool.reach import reach_master
from akv.pool.segments import LentSegments, NotMounted, remove_at_exit
from akv.pool.shared import ClientLife, shared_client
from akv.pool.threads import ThreadRunner
from akv.pool.transfers import PROCESS_BUDGET, entries_allowed
from akv.settings import Settings, StoreSettings, prepare_client_environment

__all__ = [
    "LentSegments",
    "MooncakePool",
    "RegisteredSegments",
    "ThreadRunner",
    "open_embedded_master",
    "open_pool",
    "posting",
]

#: Seconds that the master may take to answer before this process joins its pool, and before it leaves.
JOIN_DEADLINE_S = 5.0
LEAVE_DEADLINE_S = 1.0


class _Joined(NamedTuple):
    """A client that was set up and used once."""

    pool: MooncakePool
    #: The setting, for events.
    kind: str
    #: It holds the client's log.
    captured: bool


@asynccontextmanager
async def open_pool(settings: Settings) -> AsyncIterator[MooncakePool]:
    """Join the pool that checked `settings` name, or start one; leave it with the block, after every store call returned.

    Blocks of one event loop whose `settings.store` are equal share one client of the store, which the last of them closes; an
    embedded pool is its block's own.

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
        life = ClientLife(partial(_join, settings, store), partial(_join_again, settings), _may_close, _close)
        joined = await stack.enter_async_context(shared_client(store, life))
        yield joined.pool


async def _join(settings: Settings, store: StoreSettings) -> _Joined:
    """Join the pool. Undoes what it did if that fails."""
    captured = settings.client.capture_log and CLIENT_LOG.hold()
    try:
        return _Joined(await _set_up_and_prove(settings, store), settings.pool, captured)
    except BaseException:
        if captured:
            CLIENT_LOG.release()
        raise


async def _set_up_and_prove(settings: Settings, store: StoreSettings) -> MooncakePool:
    """A pool that was set up and used once, with the guard."""
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
        remove_at_exit()
        lent = await _claim_segments(store)
        try:
            await reach_master(store.master_address, JOIN_DEADLINE_S)
            if settings.exit_guard:
                PROCESS_GUARD.arm(settings.shutdown_deadline_s)
            pool = _set_up_as_allowed(store, lent)
        except BaseException:
            if lent is not None:
                lent.remove()
            raise
        lent = pool.lent
        fields["segment_memory"] = "private" if lent is None else lent.kind
        PROCESS_GUARD.hold(pool)
        try:
            fields["data_path"] = await prove_data_path(pool, settings.namespace, store)
            if lent is not None:
                await anyio.to_thread.run_sync(publish_segments, pool, lent, settings.namespace)
                lent.touch()
        except BaseException:
            with anyio.CancelScope(shield=True):
                joined = _Joined(pool, settings.pool, captured=False)
                _close(joined, await _may_close(joined))
            raise
        return pool


async def _join_again(settings: Settings, joined: _Joined) -> None:
    """The client is there already. Its master must answer, as it must whoever joins first."""
    await reach_master(joined.pool.address, JOIN_DEADLINE_S)
    if joined.pool.lent is not None:
        joined.pool.lent.touch()  # Whoever was about to close the client stopped it.
    if settings.exit_guard:
        PROCESS_GUARD.arm(settings.shutdown_deadline_s)
    emit(POOL_SHARED, pool=settings.pool, master_address=joined.pool.address, segment_bytes=settings.store.segment_bytes)


async def _claim_segments(store: StoreSettings) -> LentSegments | None:
    """Files for what this process lends; None where it is to be memory of the store's client.

    Raises PoolError where shared memory cannot hold them and the settings ask for it. **Cancellation:** nothing is left.
    """
    if not store.segment_bytes or store.segment_memory == "private":
        return None
    lent = LentSegments(store)
    try:
        _check_client_mounts_files()
        await anyio.to_thread.run_sync(lent.claim)
    except PoolError as error:
        if store.segment_memory != "auto":
            raise
        emit(SEGMENT_PRIVATE, segment_bytes=store.segment_bytes, reason=str(error))
        return None
    except BaseException:
        lent.remove()
        raise
    return lent


def _check_client_mounts_files() -> None:
    if not hasattr(load_client_module().MooncakeDistributedStore, "mount_segment"):
        raise PoolError(f"the store's client ({_client_version()}) is too old to mount files as segments: it takes 0.3.13")


def _set_up_as_allowed(store: StoreSettings, lent: LentSegments | None) -> MooncakePool:
    """As `set_up_store`; where the client does not take files, and the settings do not insist, without them."""
    try:
        return set_up_store(store, lent)
    except NotMounted as error:
        if lent is None or store.segment_memory != "auto":
            raise
        lent.remove()
        emit(SEGMENT_PRIVATE, segment_bytes=store.segment_bytes, reason=str(error))
        return set_up_store(store)


def set_up_store(store: StoreSettings, lent: LentSegments | None = None) -> MooncakePool:
    """Set a client up. Raises PoolError with the address and what usually is the cause.

    `lent`: files that it lends; without them it allocates the segment itself.
    """
    module = load_client_module()
    client = module.MooncakeDistributedStore()
    code = client.setup(
        store.local_hostname,
        store.metadata_server,
        store.segment_bytes if lent is None else 0,
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
    if lent is not None:
        try:
            lent.mount(client)
        except BaseException:
            client.close()
            raise
    own_first = None
    if store.segment_bytes:
        own_first = module.ReplicateConfig()
        own_first.preferred_segment = client.get_hostname()
    return MooncakePool(
        client,
        store.master_address,
        protocol=store.protocol,
        after_call=CLIENT_LOG.read,
        own_first=own_first,
        lent=lent,
    )


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


async def _may_close(joined: _Joined) -> bool:
    """Whether the master answers: without it, closing would hold the interpreter lock for up to a minute.

    And whether nothing touches the segments any more, which closing unmaps.
    """
    if joined.pool.lent is not None and not await anyio.to_thread.run_sync(joined.pool.lent.stop):
        return False
    try:
        await reach_master(joined.pool.address, LEAVE_DEADLINE_S)
    except PoolError:
        return False
    return True


def _close(joined: _Joined, master_answers: bool) -> None:
    """Close the store if that is safe; else leave it with the exit guard, which holds it already."""
    pool = joined.pool
    # Beside a call, closing would crash the process.
    if pool.calls_running or not master_answers:
        emit(
            CONNECTOR_UNCLEAN_EXIT,
            outstanding_calls=pool.calls_running,
            buffers=pool.buffers_registered,
            deadline_s=LEAVE_DEADLINE_S,
        )
        return
    with step(POOL_CLOSE, pool=joined.kind):
        pool.close()
    PROCESS_GUARD.release(pool)
    # A store that stays open goes on logging, and its lines stay captured.
    if joined.captured:
        CLIENT_LOG.release()


def _client_version() -> str:
    """The wheel that brought the client, and its version; several wheels bring the same package."""
    names = metadata.packages_distributions().get("mooncake", [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names))) or "unknown"
