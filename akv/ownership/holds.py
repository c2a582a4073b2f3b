"""How long the pages of finished requests are held for their saves (S7)."""

from akv.ownership.request_record import RequestRecord


class Holds:
    """Finished requests whose saves have not ended, with the time at which their hold has lasted too long."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        #: By request id and incarnation, in the order of their ends: each is held for equally long.
        self._until: dict[tuple[str, int], tuple[float, RequestRecord]] = {}

    @property
    def next_at(self) -> float:
        """When the next hold has lasted too long; infinity while there is none."""
        return next((until for until, _ in self._until.values()), float("inf"))

    def begin(self, record: RequestRecord, now: float) -> bool:
        """A request finished, and waits for its saves. Whether it is the next whose time comes."""
        self._until[record.key] = (now + self.longest_s, record)
        return len(self._until) == 1

    def end(self, key: tuple[str, int]) -> None:
        """The request closed, as most do in time; without effect on one that is not held."""
        self._until.pop(key, None)

    def expired(self, now: float) -> list[RequestRecord]:
        """Those whose time has come, oldest first. They are not held any more."""
        over = [record for until, record in self._until.values() if until <= now]
        for record in over:
            del self._until[record.key]
        return over
