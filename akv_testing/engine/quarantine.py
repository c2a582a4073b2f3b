"""Pages that a store call still touches although its request gave up on it: out of use until akv says otherwise (D2)."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from akv.errors import ConnectorBroken, NotOpenError, PagesLost
from akv.host import PagedCache, PagedSequence
from akv.values.capabilities import EngineCapabilities
from akv.values.messages import PagesPerGroup, PagesReleased
from akv.values.requests import Completion
from akv_testing.engine.config import EngineConfig

if TYPE_CHECKING:
    from akv.connector import Connector

#: (layer group, page).
_Pages = set[tuple[int, int]]


def capabilities_of(config: EngineConfig) -> EngineCapabilities:
    """What an engine with this configuration can do, for `akv.open_connector(capabilities=)`."""
    return EngineCapabilities(
        window_retention_tokens=config.window_retention_tokens, keeps_quarantined_pages=True, drafter=config.model.drafter
    )


class Quarantine:
    """What `capabilities_of()` promises by `keeps_quarantined_pages`.

    akv may name pages while their request still has its sequence, and may release them before that is over: so names are
    noted here, and given to the cache with the sequence.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        #: By request id: pages of requests that have a sequence.
        self._named: dict[str, _Pages] = {}

    def opened(self, request_id: str) -> None:
        """Begin to note names for a request, which has pages now."""
        self._named[request_id] = set()

    def name(self, request_id: str, pages: PagesPerGroup) -> None:
        """Note pages that akv named. Those of a request that has none any more were named before it gave them back."""
        if request_id in self._named:
            self._named[request_id] |= _pairs(pages)

    def release(self, request_id: str, sequence: PagedSequence) -> None:
        """The request gives its pages back; they are free, but for those in quarantine."""
        sequence.release(quarantined=self._grouped(self._named.pop(request_id, set())))

    def released(self, ended: PagesReleased) -> None:
        """The store call returned. Pages of a request that still has them are just that request's again."""
        pages = _pairs(ended.pages)
        held = self._named.get(ended.request_id, set()) & pages
        self._named.get(ended.request_id, set()).difference_update(held)
        self._cache.pages_released(self._grouped(pages - held))

    async def follow(self, kv: "Connector", freed: Callable[[], None]) -> None:
        """Hear what akv says by itself, for as long as it runs; `freed()` is called when pages may have become free."""
        with suppress(ConnectorBroken, NotOpenError):  # the batch surfaces that, once there is something to compute
            while True:
                for ended in _completed(kv):
                    if isinstance(ended, PagesReleased):
                        self.released(ended)
                        freed()
                    else:
                        self.name(ended.request_id, ended.quarantined)
                await kv.changed.wait()

    def _grouped(self, pages: _Pages) -> PagesPerGroup:
        groups = range(len(self._cache.page_counts))
        return tuple(tuple(sorted(page for at, page in pages if at == group)) for group in groups) if pages else ()


def _completed(kv: "Connector") -> list[Completion]:
    """What ended. Whose pages are lost is told of it by its own wait, too, and keeps them; the others go on (O8)."""
    while True:
        with suppress(PagesLost):
            return kv.completed()


def _pairs(pages: PagesPerGroup) -> _Pages:
    return {(group, page) for group, some in enumerate(pages) for page in some}
