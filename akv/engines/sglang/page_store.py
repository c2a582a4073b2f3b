"""Pages under keys of somebody else's, on the loop: ask, fetch into slots, put from slots, each within a deadline.

Nothing of the engine's is ever handed to the store. What a call may still touch when nobody waits for it any more is akv's own
slots, and these stay out of use until it returned (M1, M2, M3). Who copies between a slot and a page does so in its own
thread, and has finished when it returns.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import compress
from typing import cast

import msgspec
from anyio import CancelScope, create_task_group, current_time, move_on_after
from anyio.lowlevel import checkpoint

from akv import observe
from akv.errors import PoolError, SettingsError
from akv.flow.calls import CallDesk, NoSlots
from akv.flow.sealing import SealedPool
from akv.flow.staging import Staging
from akv.flow.transfer import attempt_puts, probe_keys, transfer
from akv.ownership.negative_keys import NegativeKeys
from akv.ownership.slots import SlotPool, SlotTicket
from akv.ownership.store_calls import StoreCalls
from akv.plan.breaker import Waited
from akv.plan.integrity import trailer_bytes
from akv.plan.put_attempts import PutAttempts
from akv.ports.calls import CallKind, CallRunner, CallSize
from akv.ports.device import HostBuffer, PassEvent
from akv.ports.pool import KeyAnswer, KeyState, PagePool
from akv.services.breaker import PoolBreaker
from akv.services.supervisor import Supervisor
from akv.settings import Settings
from akv.values.messages import BadPage, GroupPages

#: Pages that one store call moves at most. One batch of SGLang's is 128: while one part is copied the next is on its way.
LARGEST_PART = 32
#: Slots of one direction for pages of one size, in such parts: two under way, and two that calls which hang may keep.
PARTS = 4
#: Seconds beyond the shutdown deadline in which threads that are idle by then may end.
THREADS_GRACE_S = 1.0
#: Answers to a get that say nothing of the page: the next one may deliver it (L8).
_PASSING = frozenset({KeyState.LEASE_EXPIRED, KeyState.UNAVAILABLE})
#: The pool has no such value any more, so a put can bring it back.
_GONE = frozenset({KeyState.MISSING, KeyState.DAMAGED})


class StorePorts(msgspec.Struct, frozen=True, kw_only=True):
    """What a store of pages needs of the world. Who passes them closes the pool."""

    pool: PagePool
    runner: CallRunner
    #: Allocates so many bytes of host memory for staging.
    memory: Callable[[int], HostBuffer]


class Fetched(msgspec.Struct, frozen=True):
    """What a fetch came to."""

    #: Holds the slots until `PageStore.leave`. None: nothing was moved, and no page is there.
    slots: SlotTicket | None
    buffer: HostBuffer
    #: Where each page begins in the buffer, in bytes.
    offsets: Sequence[int]
    #: Which pages arrived whole, with exactly the size that was asked for.
    arrived: Sequence[bool]


class Room(msgspec.Struct, frozen=True):
    """Slots for pages that are about to be put: fill them, then `PageStore.put`."""

    slots: SlotTicket
    buffer: HostBuffer
    offsets: Sequence[int]


class _NoDevice:
    """Stands for a device where no copy is ever queued on one."""

    def watch(self, event: PassEvent, reached: Callable[[BaseException | None], None]) -> None:
        raise AssertionError(f"{event} of a device was watched, and pages are copied by the host here")


class PageStore:
    """One process's pages in the pool. Made by `open_page_store()`; used on the loop that opened it.

    Trouble with the pool is never raised: a page is then not there, did not arrive, or was not stored.
    """

    def __init__(self, settings: Settings, ports: StorePorts) -> None:
        self.settings = settings
        self._ports = ports
        pool = ports.pool
        #: As `StoreParts` has them.
        self.pool: PagePool = pool if settings.integrity == "off" else SealedPool(pool, settings.integrity_secret.encode())
        self.lease_s = settings.lease_s
        self.gate = PoolBreaker()
        self.calls = StoreCalls()
        self.desk = CallDesk(ports.runner, self.calls, _NoDevice(), self.gate)
        self._trailer_bytes = trailer_bytes(settings.integrity)
        #: Staging memory of each direction, by bytes of a page.
        self._stagings: dict[tuple[CallKind, int], Staging] = {}
        self._registered: list[HostBuffer] = []
        self._negative = NegativeKeys(1, settings.negative_ttl_s)
        self._services = Supervisor(self._failed)
        self.gate.quarantine_full = self._quarantine_full

    async def make_room(self, page_bytes: int) -> None:
        """Allocate and register staging memory for pages of this size. Once for each size, before any of them is moved.

        Raises SettingsError if `staging_buffer_bytes` holds no page, PoolError if the store refuses the memory.
        """
        await checkpoint()
        slot_bytes = page_bytes + self._trailer_bytes
        count = min(PARTS * LARGEST_PART, self.settings.staging_buffer_bytes // slot_bytes)
        if not count:
            raise SettingsError(
                "staging_buffer_bytes",
                self.settings.staging_buffer_bytes,
                f"a page of the engine's host pool has {page_bytes} bytes, and passes through it whole",
                f"Give at least {2 * slot_bytes} bytes.",
            )
        for kind in (CallKind.GET, CallKind.PUT):
            if (kind, page_bytes) not in self._stagings:
                buffer = self._ports.memory(count * slot_bytes)
                # On the list first: a registration that is given up leaves nothing registered.
                self._registered.append(buffer)
                await self.desk.run(CallKind.COPY, partial(self.pool.register, buffer), CallSize(0, buffer.nbytes))
                slots = SlotPool(count, slot_bytes=slot_bytes)
                self._stagings[kind, page_bytes] = Staging(buffer=buffer, slots=slots, slot_bytes=slot_bytes, share=count)

    def part(self, page_bytes: int) -> int:
        """Pages of this size that are moved together: at most half the slots, so that a copy and a store call overlap."""
        return min(LARGEST_PART, self._stagings[CallKind.GET, page_bytes].batch)

    async def present(self, keys: Sequence[str], *, to_first_hole: bool = True) -> list[bool]:
        """Which of these keys can be read, as far as is known by `lookup_deadline_s`; past it, none (L2, L4).

        With `to_first_hole` what stands behind the first key that is missing may not be asked for, and counts as missing.
        **Cancellation:** a call that is under way touches nothing.
        """
        there: list[bool] = []
        asking = False
        with move_on_after(self.settings.lookup_deadline_s) as timer, self.gate.ending_waits():
            chunk = self.settings.probe_head
            while len(there) < len(keys):
                asking = self.gate.lets_through()
                if not asking:
                    break
                there += await self._ask(keys[len(there) : len(there) + chunk])
                asking = False
                if to_first_hole and not all(there):
                    break
                chunk = self.settings.probe_chunk
        if timer.cancelled_caught:
            if asking:
                self.gate.timed_out(Waited.LOOKUP)
            return [False] * len(keys)
        return there + [False] * (len(keys) - len(there))

    async def fetch(self, keys: Sequence[str], page_bytes: int, patience_s: float) -> Fetched:
        """Read a part's pages into slots, within `patience_s` seconds. Hand the slots back with `leave`.

        **Cancellation:** as at the deadline: the wait ends, and the call keeps the slots until it returned.
        """
        staging = self._stagings[CallKind.GET, page_bytes]
        nothing = Fetched(None, staging.buffer, (), [False] * len(keys))
        ticket: SlotTicket | None = None
        answers: Sequence[KeyAnswer] | None = None
        asking = False
        try:
            with move_on_after(patience_s) as timer, self.gate.ending_waits():
                ticket = await staging.take(len(keys))
                asking = self.gate.lets_through()
                sizes = [page_bytes] * len(keys)
                answers = await transfer(self, CallKind.GET, keys, sizes, staging.buffer, staging.offsets(ticket), ticket)
        except NoSlots:
            return nothing
        finally:
            if answers is None and ticket is not None:
                ticket.leave()
        if timer.cancelled_caught and asking:
            self.gate.timed_out(Waited.LOAD)
        if answers is None or ticket is None:
            return nothing
        self._note_failed(keys, answers)
        arrived = [answer.state is KeyState.OK for answer in answers]
        return Fetched(ticket, staging.buffer, staging.offsets(ticket), arrived)

    async def room(self, count: int, page_bytes: int, patience_s: float) -> Room | None:
        """Slots for `count` pages that will be put, within `patience_s` seconds; None if there are none by then, or if the
        pool is not asked at present.

        **Cancellation:** none is kept.
        """
        staging = self._stagings[CallKind.PUT, page_bytes]
        if not self.gate.lets_through():
            await checkpoint()
            return None
        with move_on_after(patience_s):
            try:
                ticket = await staging.take(count)
            except NoSlots:
                return None
            return Room(ticket, staging.buffer, staging.offsets(ticket))
        return None

    async def put(self, room: Room, keys: Sequence[str], page_bytes: int, patience_s: float) -> list[bool]:
        """Store the pages that lie in these slots, and give the slots back. Which of them the pool took (S5).

        **Cancellation:** as at the deadline, `patience_s` seconds: the wait ends, and the call keeps the slots until it
        returned.
        """
        attempts = PutAttempts(keys)

        async def put(some: Sequence[bool]) -> Sequence[KeyAnswer] | None:
            chosen, offsets = list(compress(keys, some)), list(compress(room.offsets, some))
            return await transfer(self, CallKind.PUT, chosen, [page_bytes] * len(chosen), room.buffer, offsets, room.slots)

        async def probe(some: Sequence[bool]) -> Sequence[KeyState]:
            return [answer.state for answer in await probe_keys(self, list(compress(keys, some)))]

        with room.slots, move_on_after(patience_s), self.gate.ending_waits():
            await attempt_puts(attempts, len(keys), put, probe)
        stored = [put or found for put, found in zip(attempts.stored, attempts.found, strict=True)]
        self._negative.stored([GroupPages(0, (), (), tuple(key.encode() for key in compress(keys, attempts.stored)))])
        return stored

    async def remove_all(self, prefix: str) -> KeyAnswer:
        """Take every page out of the pool whose key begins so; UNAVAILABLE if the pool did not answer within the deadline.

        **Cancellation:** the call goes on.
        """
        with move_on_after(self.settings.load_deadline_s):
            self._negative.clear()
            (answer,) = await self.desk.run(CallKind.PROBE, lambda: [self.pool.remove_all(prefix)], CallSize())
            return cast("KeyAnswer", answer)
        return KeyAnswer(KeyState.UNAVAILABLE)

    def leave(self, fetched: Fetched) -> None:
        """The fetched pages were copied, or are not wanted: their slots go back."""
        if fetched.slots is not None:
            fetched.slots.leave()

    @property
    def quarantined_slots(self) -> int:
        """Slots that only calls hold which nobody waits for any more, or that peers may touch (M3)."""
        return sum(staging.slots.quarantined for staging in self._stagings.values())

    async def _ask(self, keys: Sequence[str]) -> list[bool]:
        """Ask for some keys in one call; those that failed lately are not asked for (L8)."""
        bad = self._negative.are_bad(0, [key.encode() for key in keys], current_time())
        asked = [key for key, is_bad in zip(keys, bad, strict=True) if not is_bad]
        told = iter(await probe_keys(self, asked) if asked else ())
        return [not is_bad and next(told).state is KeyState.OK for is_bad in bad]

    def _note_failed(self, keys: Sequence[str], answers: Sequence[KeyAnswer]) -> None:
        failed = (
            BadPage(0, key.encode(), named=answer.state not in _GONE)
            for key, answer in zip(keys, answers, strict=True)
            if answer.state is not KeyState.OK and answer.state not in _PASSING
        )
        self._negative.failed(failed, current_time())

    def _quarantine_full(self) -> bool:
        """Whether calls that were given up hold too much memory, or a part has no place any more (M3, O7)."""
        stagings = self._stagings.values()
        held = sum(staging.slots.quarantined_bytes for staging in stagings)
        half = sum(staging.buffer.nbytes for staging in stagings) // 2
        return held > (self.settings.quarantine_max_bytes or half) or any(s.slots.usable < s.batch for s in stagings)

    def _failed(self, error: Exception) -> bool:
        """A service failed: the engine goes on, and finds nothing from now on (O8)."""
        if self._services.all_started:
            observe.emit(observe.CONNECTOR_DEGRADED, reason=type(error).__name__, error=error)
            self.gate.shut()
        return self._services.all_started

    async def _close(self) -> None:
        """Wait for what is under way, as long as the shutdown may take, then let go of what no call touches (O6)."""
        deadline = current_time() + self.settings.shutdown_deadline_s
        self.gate.shut()
        with move_on_after(self.settings.shutdown_deadline_s, shield=True):
            await self.desk.drained()
        left_s = max(0.0, deadline - current_time())
        with move_on_after(left_s + THREADS_GRACE_S, shield=True):
            await self._ports.runner.close(left_s)
        self._services.stop()
        for buffer in self._registered if not self.calls.outstanding else ():
            try:
                self.pool.unregister(buffer)
            except PoolError as error:
                observe.emit(observe.MEMORY_KEPT, bytes=buffer.nbytes, error=error)


@asynccontextmanager
async def open_page_store(settings: Settings, ports: StorePorts | None = None) -> AsyncIterator[PageStore]:
    """Join the pool of checked settings, and serve pages until the block ends. `ports` stand in for Mooncake and threads.

    Raises what `akv.pool.open_pool` raises. **Cancellation:** closes as the end does, within `shutdown_deadline_s`.
    """
    async with AsyncExitStack() as stack:
        given = ports if ports is not None else await stack.enter_async_context(_own_ports(settings))
        store = PageStore(settings, given)
        # Nobody writes this key: those of pages have more parts.
        ask = partial(probe_unguarded, store, [f"{settings.namespace}/breaker"])
        async with create_task_group() as group:
            await store._services.start(group, given.runner.serve, sees_ends=True)
            await store._services.start(group, partial(store.gate.run, ask))
            store._services.all_started = True
            try:
                yield store
            finally:
                with CancelScope(shield=True):
                    await store._close()


async def probe_unguarded(store: PageStore, keys: Sequence[str]) -> Sequence[KeyAnswer]:
    """Ask for keys though the gate is shut, as the breaker's own probe does."""
    answers: Sequence[KeyAnswer] = await store.desk.run(CallKind.PROBE, partial(store.pool.probe, keys), CallSize(len(keys)))
    return answers


@asynccontextmanager
async def _own_ports(settings: Settings) -> AsyncIterator[StorePorts]:
    """Mooncake, threads and plain host memory. Imported here, so that asking for the module loads none of them."""
    from akv.device.host_memory import TorchBuffer  # noqa: PLC0415
    from akv.pool import ThreadRunner, open_pool  # noqa: PLC0415

    runner = ThreadRunner(
        {CallKind.PROBE: settings.probe_concurrency, CallKind.GET: settings.loaders, CallKind.PUT: settings.savers}
    )
    async with open_pool(settings) as pool:
        yield StorePorts(pool=pool, runner=runner, memory=partial(TorchBuffer, pinned=False))
