"""The memory of a worker half that the store reaches: staging, the snapshot ring, the engine's own pages where it may.

Allocated and registered once, when the worker half opens; given back behind the last call (`memory.md`).
"""

from akv import observe
from akv.errors import PoolError, SettingsError
from akv.flow.calls import CallDesk
from akv.flow.snapshot import Ring
from akv.flow.staging import Staging
from akv.ownership.slots import SlotPool
from akv.ownership.snapshots import SnapshotClaims
from akv.plan.integrity import trailer_bytes
from akv.plan.ring import ring_slots
from akv.ports import Ports
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import HostBuffer, HostRegion
from akv.settings import Settings
from akv.values.layout import Layout

#: Pages that one store call moves at most: what the adapter hands to the client in one piece. The first pages of a long load
#: reach the device while the rest is on its way.
LARGEST_BATCH = 256


class WorkerMemory:
    """Host memory of one worker half. Its coroutines are called once each, while the worker half opens."""

    def __init__(self, settings: Settings, layout: Layout, ports: Ports, desk: CallDesk) -> None:
        self._settings = settings
        self._layout = layout
        self._ports = ports
        self._desk = desk
        #: Behind a page in its slot is room for its trailer (S11).
        self.trailer_bytes = trailer_bytes(settings.integrity)
        self._slot_bytes = layout.largest_page_bytes + self.trailer_bytes
        self._page_bytes = tuple(group.bytes_per_page for group in layout.groups)
        #: Staging memory of each direction.
        self.stagings: list[Staging] = []
        #: What is on this list is registered with the pool, or about to be.
        self._registered: list[HostBuffer] = []

    async def staging(self, sharers: int) -> Staging:
        """Memory of one direction, which `sharers` loaders or savers share."""
        slots = self._settings.staging_buffer_bytes // self._slot_bytes
        # Two batches, so that a copy and a store call overlap. More slots than that would only be pinned for nothing.
        share = min(2 * LARGEST_BATCH, slots // sharers)
        nbytes = share * sharers * self._slot_bytes
        buffer = await self._host_memory("staging_buffer_bytes", self._settings.staging_buffer_bytes, nbytes)
        pool = SlotPool(share * sharers, slot_bytes=self._slot_bytes)
        staging = Staging(buffer=buffer, slots=pool, slot_bytes=self._slot_bytes, share=share)
        await self._register(buffer)
        self.stagings.append(staging)
        return staging

    async def ring(self) -> Ring | None:
        """Allocate the snapshot ring, if this model and this role need one."""
        settings, device, layout = self._settings, self._ports.device, self._layout
        slots = ring_slots(layout.groups, settings.rewind_tokens, layout.tokens_per_block, settings.snapshot_slots)
        if not slots or settings.role == "consumer":
            return None
        slot_bytes = max(group.bytes_per_page for group in layout.groups if group.is_window) + self.trailer_bytes
        buffer = await self._host_memory("snapshot_slots", slots, slots * slot_bytes)
        on_device = min(slots, settings.snapshot_device_bytes // slot_bytes)
        device_buffer = None
        if on_device:
            size = CallSize(0, on_device * slot_bytes)
            device_buffer = await self._desk.run(CallKind.COPY, lambda: device.device_buffer(size.bytes), size)
        await self._register(buffer)
        host_slots = SlotPool(slots, slot_bytes=slot_bytes)
        return Ring(
            claims=SnapshotClaims(host_slots, None if device_buffer is None else SlotPool(on_device)),
            buffer=buffer,
            device_buffer=device_buffer,
            stream=device.open_stream("akv-snapshot"),
            slot_bytes=slot_bytes,
            page_bytes=self._page_bytes,
            wait_s=settings.snapshot_wait_ms / 1000,
        )

    async def reach_pages(self, regions: list[HostRegion | None]) -> None:
        """Let the store reach the pages of caches in host memory itself, without a copy of ours: fill in where they lie."""
        for group in range(len(regions)):
            region = self._ports.device.host_region(group)
            # Layer groups may share memory, and the store takes no piece of memory twice.
            if region is not None and region.buffer not in self._registered:
                await self._register(region.buffer)
            regions[group] = region

    def unregister(self) -> None:
        """Take back from the store what it was told of. Only when no call is outstanding.

        What it does not give back is kept alive by the pool, and told: the others must not be left for it.
        """
        for buffer in self._registered:
            try:
                self._ports.pool.unregister(buffer)
            except PoolError as error:
                observe.emit(observe.MEMORY_KEPT, bytes=buffer.nbytes, error=error)
        self._registered.clear()
        self.stagings.clear()

    async def _register(self, buffer: HostBuffer) -> None:
        # On the list first: an opening that is cancelled in between leaves nothing registered.
        self._registered.append(buffer)
        pool = self._ports.pool
        await self._desk.run(CallKind.COPY, lambda: pool.register(buffer), CallSize(0, buffer.nbytes))

    async def _host_memory(self, setting: str, value: object, nbytes: int) -> HostBuffer:
        device = self._ports.device
        try:
            buffer: HostBuffer = await self._desk.run(CallKind.COPY, lambda: device.host_buffer(nbytes), CallSize(0, nbytes))
        except MemoryError as error:
            raise SettingsError(
                setting,
                value,
                f"{nbytes} bytes of host memory cannot be had: {error}",
                "Give less of it, or raise what this process may lock and use.",
            ) from error
        return buffer
