"""Beside the fourth step: window pages are copied at the pass, since the engine reuses them right after it (S3, S4, M5).

`plan/window.py` decided which pages make an end resumable, `ownership/snapshots.py` holds the slots that were asked for when
the pass was planned. The copies are queued on the execution stream, before the pass's event; the puts go from the slots,
whenever a saver gets to them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec
from anyio import Event, move_on_after
from anyio.lowlevel import checkpoint

from akv import observe
from akv.errors import AkvError, DeviceError
from akv.flow.calls import CallDesk
from akv.ownership.snapshots import SnapshotClaim, SnapshotClaims
from akv.plan.batching import slot_offsets
from akv.ports.calls import CallSize
from akv.ports.device import CopyStream, DeviceBuffer, DeviceCopier, DeviceSlots, HostBuffer, PassEvent
from akv.values.messages import PassPlan


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """The memory behind the snapshot ring, and who holds it."""

    claims: SnapshotClaims
    buffer: HostBuffer
    #: None where copies go to the host at once.
    device_buffer: DeviceBuffer | None
    #: Carries pages from device slots to the host, beside the execution stream.
    stream: CopyStream
    slot_bytes: int
    page_bytes: Sequence[int]
    wait_s: float


class Snapshot(msgspec.Struct, frozen=True):
    """Window pages of one order, in slots from `arrived` on."""

    claim: SnapshotClaim
    buffer: HostBuffer
    #: For each of the order's groups, where its pages lie in the buffer, in bytes.
    offsets: tuple[list[int], ...]
    arrived: PassEvent

    def leave(self) -> None:
        """Nobody saves them: as `Taken` says."""
        self.claim.leave()


class Taken(Protocol):
    """Window pages that were copied at the pass, or that another process says it will have copied."""

    def leave(self) -> None:
        """Nobody saves them: their slots go back when the copy has ended."""
        ...


class RingNews:
    """Wakes passes that wait for slots."""

    def __init__(self) -> None:
        self._event = Event()

    def wake(self) -> None:
        """Slots were granted."""
        self._event.set()
        self._event = Event()

    async def wait(self) -> None:
        """Wait until slots are granted, to anybody. Cancellation: nothing is held."""
        await self._event.wait()


class Together:
    """Several copies as one event: completed when all have, failed when one has and none runs any more."""

    def __init__(self) -> None:
        self._events: list[PassEvent] = []
        self._failure: Exception | None = None

    def queue(self, copies: Iterable[Callable[[], PassEvent]]) -> "Together":
        """Queue one after the other. If one cannot be queued, those before it are still waited for."""
        try:
            for copy in copies:
                self._events.append(copy())
        except (AkvError, RuntimeError, ValueError, MemoryError) as failure:  # what devices raise; told by `query`
            self._failure = failure
        return self

    def query(self) -> bool:
        """As `PassEvent.query()`."""
        running: list[PassEvent] = []
        for event in self._events:
            try:
                if not event.query():
                    running.append(event)
            except DeviceError as failure:
                self._failure = self._failure or failure
        self._events = running
        if not running and self._failure is not None:
            raise DeviceError(f"window pages could not be copied: {self._failure}") from self._failure
        return not running


async def take_snapshots(
    ring: Ring, news: RingNews, device: DeviceCopier, desk: CallDesk, plan: PassPlan, taken: dict[int, Taken]
) -> None:
    """Copy a plan's window pages into its slots, and note in `taken` what is copied, by the order's number.

    A claim without its slots `wait_s` seconds after the forward is dropped, and counted: a later lookup falls back to an
    earlier end. Returns once the copies are queued on the execution stream, not when they are done.

    **Cancellation:** ends the wait for slots, and takes effect when nothing is about to be queued any more: `taken` is right
    then, and the slots of everything else are back.
    """
    wanted = {order.save_id for order in plan.saves}
    claims = ring.claims.take(plan.plan_id)
    for claim in claims:
        if claim.order.save_id not in wanted:
            claim.leave()
    claims = [claim for claim in claims if claim.order.save_id in wanted]
    try:
        if ring.wait_s and any(claim.waiting for claim in claims):
            with move_on_after(ring.wait_s):
                while any(claim.waiting for claim in claims):
                    await news.wait()
        granted = [claim for claim in claims if claim.granted]
        if granted:
            await _copy(ring, device, desk, granted, taken)
        else:
            await checkpoint()
    finally:
        for claim in claims:
            if claim.order.save_id not in taken:
                claim.leave()
                _dropped(claim)


async def _copy(
    ring: Ring, device: DeviceCopier, desk: CallDesk, claims: list[SnapshotClaim], taken: dict[int, Taken]
) -> None:
    """Queue the copies of all claims: per layer group one gather for each buffer, however many requests end in the pass."""
    for claim in claims:
        claim.settle()
    pieces = [piece for claim in claims for piece in _pieces(ring, claim)]
    copies: dict[tuple[int, bool], list[_Piece]] = {}
    for piece in pieces:
        copies.setdefault((piece.group, piece.device_offsets is not None), []).append(piece)
    calls = [partial(_copy_group, ring, device, group, some) for (group, _), some in copies.items()]
    tickets = [ticket for claim in claims for ticket in (claim.host, claim.device) if ticket is not None]

    def queued(arrived: PassEvent) -> None:
        for claim in claims:
            offsets = tuple(piece.offsets for piece in pieces if piece.claim is claim)
            taken[claim.order.save_id] = Snapshot(claim, ring.buffer, offsets, arrived)

    pages = sum(len(piece.pages) for piece in pieces)
    nbytes = sum(len(piece.pages) * ring.page_bytes[piece.group] for piece in pieces)
    await desk.issue(lambda: Together().queue(calls), CallSize(pages, nbytes), tickets, queued)


class _Piece(NamedTuple):
    """One order's pages of one layer group, and their slots."""

    claim: SnapshotClaim
    group: int
    pages: Sequence[int]
    offsets: list[int]
    device_offsets: list[int] | None


def _pieces(ring: Ring, claim: SnapshotClaim) -> Iterator[_Piece]:
    if claim.host is None:
        raise AssertionError("a granted claim has slots")
    slots = iter(slot_offsets(claim.host.slots, ring.slot_bytes))
    on_device = None if claim.device is None else iter(slot_offsets(claim.device.slots, ring.slot_bytes))
    for group in claim.order.groups:
        count = len(group.pages)
        through = None if on_device is None else list(islice(on_device, count))
        yield _Piece(claim, group.group, group.pages, list(islice(slots, count)), through)


def _copy_group(ring: Ring, device: DeviceCopier, group: int, pieces: list[_Piece]) -> PassEvent:
    pages = [page for piece in pieces for page in piece.pages]
    offsets = [offset for piece in pieces for offset in piece.offsets]
    via = None
    if ring.device_buffer is not None and pieces[0].device_offsets is not None:
        via = DeviceSlots(ring.device_buffer, [offset for piece in pieces for offset in piece.device_offsets or ()])
    return device.snapshot(ring.stream, group, pages, ring.buffer, offsets, via)


def _dropped(claim: SnapshotClaim) -> None:
    observe.emit(
        observe.SNAPSHOT_DROPPED,
        request_id=claim.order.request_id,
        incarnation=claim.order.incarnation,
        pages=claim.order.pages,
        reason="too_large" if claim.host is None else "no_slots" if not claim.granted else "cancelled",
    )
