"""What the worker halves of all ranks were told and have not all ended, and what their reports come to together (D1, D2).

A page is one index in the cache of every rank, with a shard of its own in each: a load has ended when every rank's part has, a
block is stored when every rank's shard is (L2). The scheduler half hears of each end once, as if of a single worker half.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from akv.ownership.rank_quarantine import RankQuarantine, Who
from akv.ownership.read_paths import ReadPaths, in_order
from akv.values.messages import (
    BadPage,
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    PagesPerGroup,
    PagesUnread,
    PassReport,
    SaveOrder,
    SaveResult,
    Withdrawal,
)

#: The reason with which a save counts as refused that some rank may have stored before the pool was lost.
POOL_LOST = "pool_lost"
#: The reason with which loads fail and saves are refused that a rank never heard of, since it had ended.
RANK_ENDED = "rank_ended"


class PartsOfSave:
    """What ranks said of one save so far. Gathered as it comes: a save has thousands of blocks."""

    __slots__ = ("awaited", "bytes", "dropped", "order", "reason", "refused")

    def __init__(self, order: SaveOrder, world: int) -> None:
        self.order = order
        self.awaited = set(range(world))
        self.refused: set[int] = set()
        self.dropped: set[int] = set()
        self.bytes = 0
        self.reason = ""

    def add(self, rank: int, result: SaveResult) -> bool:
        """Whether the save ended with this: with what its last rank said. A rank that has said it counts once."""
        if rank not in self.awaited:
            return False
        self.awaited.remove(rank)
        self.refused.update(result.refused)
        self.dropped.update(result.dropped)
        self.bytes += result.bytes
        self.reason = self.reason or result.reason
        return not self.awaited

    def doubt(self) -> None:
        """What ranks stored of it may be gone again."""
        self.refused.update(*(group.blocks for group in self.order.groups))
        self.reason = self.reason or POOL_LOST

    def merged(self) -> SaveResult:
        """Each block as the rank ended it that did worst by it: all shards of a stored block are in the pool."""
        blocks: set[int] = set().union(*{group.blocks for group in self.order.groups})
        refused = blocks & self.refused
        dropped = (blocks & self.dropped) - refused
        return SaveResult(
            save_id=self.order.save_id,
            request_id=self.order.request_id,
            incarnation=self.order.incarnation,
            stored=tuple(sorted(blocks - refused - dropped)),
            refused=tuple(sorted(refused)),
            dropped=tuple(sorted(dropped)),
            bytes=self.bytes,
            reason=self.reason,
        )


class RankLedger:
    """The orders of one scheduler half that have not ended on all of its ranks."""

    def __init__(self, world: int) -> None:
        """`world`: how many ranks there are."""
        self._world = world
        #: With what ranks said so far, by rank, in the order in which they said it.
        self._loads: dict[int, tuple[LoadOrder, dict[int, LoadResult]]] = {}
        self._saves: dict[int, PartsOfSave] = {}
        #: Withdrawals that were sent, until nothing reads these pages on any rank.
        self._unread: dict[Who, dict[int, PagesUnread]] = {}
        #: Loads and saves of each incarnation.
        self._outstanding: Counter[Who] = Counter()
        self._quarantine = RankQuarantine()

    @property
    def active(self) -> int:
        """Loads, saves and withdrawals that have not ended on all ranks."""
        return len(self._loads) + len(self._saves) + len(self._unread)

    @property
    def quarantined(self) -> list[GroupPages]:
        """The pages in quarantine on some rank, one entry per group; their blocks and hashes are not known, and left empty."""
        return self._quarantine.columns

    @property
    def touched(self) -> list[GroupPages]:
        """The pages that some rank may fill or read for what is outstanding; what it copied into slots it reads no more."""
        return self.touched_but_for(())

    def touched_but_for(self, untold: Collection[int]) -> list[GroupPages]:
        """As `touched`, where no rank was told of the loads and saves of these numbers yet."""
        loads = [columns for order, _ in self._loads.values() if order.load_id not in untold for columns in order.groups]
        live = [parts.order for parts in self._saves.values() if not parts.order.snapshot]
        return [*loads, *(columns for order in live if order.save_id not in untold for columns in order.groups)]

    def touched_pages(self, groups: int) -> PagesPerGroup:
        """Every page that a copy or call of some rank may touch, once, in each of the layout's groups; `()` for none."""
        tables: list[set[int]] = [set() for _ in range(groups)]
        for columns in [*self.touched, *self.quarantined]:
            tables[columns.group].update(columns.pages)
        return tuple(tuple(sorted(pages)) for pages in tables) if any(tables) else ()

    def load_sent(self, order: LoadOrder) -> None:
        """Every rank is told this order."""
        if order.load_id in self._loads:
            raise AssertionError(f"load {order.load_id} is outstanding already")
        self._loads[order.load_id] = (order, {})
        self._outstanding[order.request_id, order.incarnation] += 1

    def saves_sent(self, orders: Iterable[SaveOrder]) -> None:
        """Every rank is told these orders, and that it is to carry them out: of a plan, those that its end names."""
        for order in orders:
            if order.save_id in self._saves:
                raise AssertionError(f"save {order.save_id} is outstanding already")
            self._saves[order.save_id] = PartsOfSave(order, self._world)
            self._outstanding[order.request_id, order.incarnation] += 1

    def withdrawn(self, message: Withdrawal) -> PagesUnread | None:
        """An incarnation ended. None: every rank is to be told, and says when it reads these pages no more. Else what all of
        them would say at once, since nothing of the incarnation is outstanding anywhere; nobody need be told.
        """
        who = (message.request_id, message.incarnation)
        if who not in self._outstanding and who not in self._unread:
            return PagesUnread(request_id=who[0], incarnation=who[1])
        # One that was withdrawn before is waited for as it was: its ranks began nothing since, and may answer twice or once.
        self._unread.setdefault(who, {})
        return None

    def doubt_saves(self) -> None:
        """The pool may have lost what it was given so far: outstanding saves count as refused, whatever ranks say of them."""
        for parts in self._saves.values():
            parts.doubt()

    def reported(self, rank: int, report: PassReport) -> PassReport:
        """One rank's report came. Returns what ended on all ranks with it, in that order.

        What is not outstanding is ignored: it was told twice, or lost. Raises ValueError if there is no such rank.
        """
        if not 0 <= rank < self._world:
            raise ValueError(f"rank {rank} reports to a server of {self._world} ranks: they are numbered from 0")
        loads = [result.load_id for result in report.loads if self._load_ended(rank, result)]
        saves = [result.save_id for result in report.saves if self._save_ended(rank, result)]
        unread = [who for message in report.unread if (who := self._pages_unread(rank, message)) is not None]
        released = [self._quarantine.release(rank, message) for message in report.released]
        # Behind the releases: what is free again is not named as in quarantine.
        return PassReport(
            loads=tuple(self._merged_load(load_id) for load_id in loads),
            saves=tuple(self._merged_save(save_id) for save_id in saves),
            unread=tuple(self._merged_unread(who) for who in unread),
            released=tuple(message for message in released if message is not None),
        )

    def unanswered(self, rank: int) -> PassReport:
        """What this rank has not said of what is outstanding, as it would say it of what never began there: of one that has
        ended, and says nothing more.
        """
        return PassReport(
            loads=tuple(
                LoadResult(
                    load_id=order.load_id,
                    request_id=order.request_id,
                    incarnation=order.incarnation,
                    state=LoadState.FAILED,
                    reason=RANK_ENDED,
                )
                for order, parts in self._loads.values()
                if rank not in parts
            ),
            saves=tuple(
                SaveResult(
                    save_id=order.save_id,
                    request_id=order.request_id,
                    incarnation=order.incarnation,
                    refused=tuple(sorted({block for group in order.groups for block in group.blocks})),
                    reason=RANK_ENDED,
                )
                for order in (parts.order for parts in self._saves.values() if rank in parts.awaited)
            ),
            unread=tuple(
                PagesUnread(request_id=request_id, incarnation=incarnation)
                for (request_id, incarnation), parts in self._unread.items()
                if rank not in parts
            ),
        )

    def lost(self) -> None:
        """The connector ended: nobody will report what is outstanding, or hear of it."""
        self._loads.clear()
        self._saves.clear()
        self._unread.clear()
        self._outstanding.clear()
        self._quarantine.clear()

    def _load_ended(self, rank: int, result: LoadResult) -> bool:
        """Whether every rank ended it now."""
        order, parts = self._loads.get(result.load_id, (None, {}))
        if order is None or rank in parts:
            return False
        parts[rank] = result
        self._quarantine.keep(rank, (order.request_id, order.incarnation), result.quarantined)
        return len(parts) == self._world

    def _save_ended(self, rank: int, result: SaveResult) -> bool:
        parts = self._saves.get(result.save_id)
        return parts is not None and parts.add(rank, result)

    def _pages_unread(self, rank: int, message: PagesUnread) -> Who | None:
        """Whose pages are unread on every rank now."""
        who = (message.request_id, message.incarnation)
        parts = self._unread.get(who)
        if parts is None or rank in parts:
            return None
        parts[rank] = message
        self._quarantine.keep(rank, who, message.quarantined)
        return who if len(parts) == self._world else None

    def _merged_load(self, load_id: int) -> LoadResult:
        order, parts = self._loads.pop(load_id)
        who = (order.request_id, order.incarnation)
        self._ended(who)
        quarantined = self._quarantine.tell(who, [result.quarantined for result in parts.values()])
        return merged_load(order, parts, quarantined)

    def _merged_save(self, save_id: int) -> SaveResult:
        parts = self._saves.pop(save_id)
        self._ended((parts.order.request_id, parts.order.incarnation))
        return parts.merged()

    def _merged_unread(self, who: Who) -> PagesUnread:
        parts = self._unread.pop(who)
        quarantined = self._quarantine.tell(who, [message.quarantined for message in parts.values()])
        return PagesUnread(request_id=who[0], incarnation=who[1], quarantined=quarantined)

    def _ended(self, who: Who) -> None:
        self._outstanding[who] -= 1
        if not self._outstanding[who]:
            del self._outstanding[who]


def merged_load(order: LoadOrder, parts: Mapping[int, LoadResult], quarantined: PagesPerGroup) -> LoadResult:
    """How a load ended, from how each rank's part did, by rank; whichever failed first names key and reason."""
    results = [parts[rank] for rank in sorted(parts)]
    failed = next((result for result in parts.values() if result.state is LoadState.FAILED), None)
    if failed is not None:
        state = LoadState.FAILED
    else:
        loaded = all(result.state is LoadState.LOADED for result in results)
        state = LoadState.LOADED if loaded else LoadState.CANCELLED
    paths = ReadPaths()
    for result in results:
        paths.add(result)
    landed = results if state is LoadState.LOADED else []
    return LoadResult(
        load_id=order.load_id,
        request_id=order.request_id,
        incarnation=order.incarnation,
        state=state,
        pages=sum(result.pages for result in landed),
        bytes=sum(result.bytes for result in landed),
        direct_pages=paths.direct_pages,
        direct_bytes=paths.direct_bytes,
        staged=in_order(paths.staged),
        staged_bytes=in_order(paths.staged_bytes),
        failed_key="" if failed is None else failed.failed_key,
        reason="" if failed is None else failed.reason,
        bad_pages=merged_bad_pages(results),
        quarantined=quarantined,
    )


def merged_bad_pages(results: Sequence[LoadResult]) -> tuple[BadPage, ...]:
    """Each page that a rank did not get, once. Where the pool named the shard of any rank a put mends nothing, so the page
    stays bad (L8).
    """
    named: dict[tuple[int, bytes], bool] = {}
    for result in results:
        for page in result.bad_pages:
            key = (page.group, page.hash)
            named[key] = named.get(key, False) or page.named
    return tuple(BadPage(group, block_hash, named=is_named) for (group, block_hash), is_named in named.items())
