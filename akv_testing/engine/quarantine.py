"""Pages that a store call still touches although its request gave up on it: out of use until akv says otherwise (D2)."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from akv.errors import ConnectorBroken, NotOpenError
from akv.host import Hold, PagedSequence
from akv.values.capabilities import EngineCapabilities
from akv.values.messages import PagesPerGroup, PagesReleased
from akv_testing.engine.config import EngineConfig

if TYPE_CHECKING:
    from akv.connector import Connector

#: (layer group, page).
_Pages = set[tuple[int, int]]


def capabilities_of(config: EngineConfig) -> EngineCapabilities:
    """What an engine with this configuration can do, for `akv.open_connector(capabilities=)`."""
    return EngineCapabilities(window_retention_tokens=config.window_retention_tokens, keeps_quarantined_pages=True)


class Quarantine:
    """What `capabilities_of()` promises by `keeps_quarantined_pages`.

    akv may name pages while their request still has its sequence, and may release them before that is over: names are kept
    here until both have let go. A sequence with such a page is held as a whole until its last one is released. That is more
    than has to be held, for a case that is rare; others may go on reading what was computed.
    """

    def __init__(self) -> None:
        #: By request id: pages of requests that have a sequence.
        self._named: dict[str, _Pages] = {}
        #: Pages of sequences that were given up, with what keeps them out of use.
        self._held: list[tuple[_Pages, Hold]] = []

    def opened(self, request_id: str) -> None:
        """Begin to note names for a request, which has pages now."""
        self._named[request_id] = set()

    def name(self, request_id: str, pages: PagesPerGroup) -> None:
        """Note pages that akv named. Those of a request that has none any more were named before it gave them back."""
        if request_id in self._named:
            self._named[request_id] |= _pairs(pages)

    def release(self, request_id: str, sequence: PagedSequence) -> None:
        """The request gives its pages back; they are free unless one of them is in quarantine."""
        named = self._named.pop(request_id, set())
        if named:
            self._held.append((named, sequence.hold()))
        sequence.release()

    def released(self, ended: PagesReleased) -> None:
        """The store call returned."""
        pages = _pairs(ended.pages)
        # A page stands in one of these places at most: it was named to one request, and is nobody else's meanwhile.
        for named in (*self._named.values(), *(named for named, _ in self._held)):
            named.difference_update(pages)
        for named, hold in self._held:
            if not named:
                hold.release()
        self._held = [(named, hold) for named, hold in self._held if named]

    async def follow(self, kv: "Connector", freed: Callable[[], None]) -> None:
        """Hear what akv says by itself, for as long as it runs; `freed()` is called when pages may have become free."""
        with suppress(ConnectorBroken, NotOpenError):  # the batch surfaces that, once there is something to compute
            while True:
                for ended in kv.completed():
                    if isinstance(ended, PagesReleased):
                        self.released(ended)
                        freed()
                    else:
                        self.name(ended.request_id, ended.quarantined)
                await kv.changed.wait()


def _pairs(pages: PagesPerGroup) -> _Pages:
    return {(group, page) for group, some in enumerate(pages) for page in some}
