"""What loads and saves tell the event log: one event when one is queued, one or more when it ended."""

from collections.abc import Sequence

from anyio import current_time

from akv import observe
from akv.ownership.backlog import Shed
from akv.ownership.read_paths import ReadPaths, in_order
from akv.ownership.segments import Segments
from akv.values.messages import GroupPages, LoadOrder, LoadResult, LoadState, PagesReleased, PagesUnread, SaveOrder, SaveResult
from akv.values.pressure import Reads


class TransferReporter:
    """Remembers when each transfer was queued, and reports its end with the time it took."""

    def __init__(self, page_bytes: Sequence[int]) -> None:
        #: Bytes of one page in each layer group.
        self._page_bytes = page_bytes
        #: When each unfinished load and save was queued, by its number (one counter numbers both).
        self._began: dict[int, float] = {}
        #: Of all loads that ended.
        self._paths = ReadPaths()

    def load_queued(self, order: LoadOrder) -> None:
        """A reservation was taken over."""
        self._began[order.load_id] = current_time()
        observe.emit(
            observe.LOAD_QUEUED,
            request_id=order.request_id,
            incarnation=order.incarnation,
            load_id=order.load_id,
            pages=_count(order.groups),
            bytes=self._bytes(order.groups),
        )

    def save_queued(self, order: SaveOrder) -> None:
        """Computed blocks were handed over."""
        self._began[order.save_id] = current_time()
        observe.emit(
            observe.SAVE_QUEUED,
            request_id=order.request_id,
            incarnation=order.incarnation,
            save_id=order.save_id,
            blocks=len(order.groups[0].blocks),
            pages=_count(order.groups),
            bytes=self._bytes(order.groups),
        )

    def load_ended(self, result: LoadResult) -> None:
        """A load reached its terminal state."""
        took = current_time() - self._began.pop(result.load_id)
        self._paths.add(result)
        request_id, incarnation, load_id = result.request_id, result.incarnation, result.load_id
        if result.state is LoadState.LOADED:
            observe.emit(
                observe.LOAD_COMPLETE,
                request_id=request_id,
                incarnation=incarnation,
                load_id=load_id,
                pages=result.pages,
                bytes=result.bytes,
                direct_pages=result.direct_pages,
                direct_bytes=result.direct_bytes,
                staged=result.staged,
                staged_bytes=result.staged_bytes,
                duration_s=took,
            )
        elif result.state is LoadState.FAILED:
            observe.emit(
                observe.LOAD_FAILED,
                request_id=request_id,
                incarnation=incarnation,
                load_id=load_id,
                reason=result.reason,
                duration_s=took,
            )
            if result.failed_key:
                observe.emit(
                    observe.LOAD_FAILED_KEY,
                    request_id=request_id,
                    incarnation=incarnation,
                    load_id=load_id,
                    key=result.failed_key,
                )
        else:
            observe.emit(
                observe.LOAD_CANCELLED, request_id=request_id, incarnation=incarnation, load_id=load_id, duration_s=took
            )

    def save_ended(self, result: SaveResult) -> None:
        """A save ended; each of its blocks stands in one of at most three events."""
        took = current_time() - self._began.pop(result.save_id)
        request_id, incarnation, save_id = result.request_id, result.incarnation, result.save_id
        if result.stored:
            observe.emit(
                observe.SAVE_COMPLETE,
                request_id=request_id,
                incarnation=incarnation,
                save_id=save_id,
                blocks=len(result.stored),
                bytes=result.bytes,
                duration_s=took,
            )
        if result.refused:
            observe.emit(
                observe.SAVE_REFUSED,
                request_id=request_id,
                incarnation=incarnation,
                save_id=save_id,
                blocks=len(result.refused),
                reason=result.reason,
            )
        if result.dropped:
            observe.emit(
                observe.SAVE_DROPPED,
                request_id=request_id,
                incarnation=incarnation,
                save_id=save_id,
                blocks=len(result.dropped),
                reason="withdrawn",
            )

    def reads(self, segments: Segments) -> Reads:
        """Which way the pages of all loads came that ended, and what could be read directly now."""
        paths = self._paths
        return Reads(
            direct_pages=paths.direct_pages,
            direct_bytes=paths.direct_bytes,
            staged=in_order(paths.staged),
            staged_bytes=in_order(paths.staged_bytes),
            segments=len(segments.all_mapped),
            segment_bytes=segments.mapped_bytes,
        )

    def quarantined(self, ended: LoadResult | PagesUnread) -> None:
        """What ended may have left pages in quarantine."""
        if ended.quarantined:
            observe.emit(
                observe.PAGES_QUARANTINED,
                request_id=ended.request_id,
                incarnation=ended.incarnation,
                pages=sum(map(len, ended.quarantined)),
            )

    def released(self, message: PagesReleased) -> None:
        """Pages left quarantine."""
        observe.emit(
            observe.PAGES_RELEASED,
            request_id=message.request_id,
            incarnation=message.incarnation,
            pages=sum(map(len, message.pages)),
        )

    def _bytes(self, groups: Sequence[GroupPages]) -> int:
        return sum(len(group.pages) * self._page_bytes[group.group] for group in groups)


def report_shed(shed: Shed) -> None:
    """Tell what one hand-over was too much by: once, however many requests it is of, but for the ends that it costs."""
    windows = [order for order in shed.orders if order.window]
    again = [order for order in shed.orders if order.probe_first and not order.window]
    blocks = [order for order in shed.orders if not order.probe_first and not order.window]
    observe.emit(
        observe.BACKLOG_FULL,
        requests=len({order.incarnation for order in shed.orders}),
        blocks=sum(len(order.groups[0].blocks) for order in blocks),
        window_pages=sum(order.pages for order in windows),
        listed_again=sum(len(order.groups[0].blocks) for order in again),
        backlog_bytes=shed.under_way.bytes,
        backlog_passes=shed.under_way.passes,
    )
    for order in windows:
        # Without a snapshot it is a finished request's, whose own event says what its end lacks.
        if order.snapshot:
            observe.emit(
                observe.SNAPSHOT_DROPPED,
                request_id=order.request_id,
                incarnation=order.incarnation,
                pages=order.pages,
                reason="backlog_full",
            )


def _count(groups: Sequence[GroupPages]) -> int:
    return sum(len(group.pages) for group in groups)
