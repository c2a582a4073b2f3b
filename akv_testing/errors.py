"""What the fakes raise when the code under test breaks the promise of a port.

All are `AssertionError`s: no adapter may map them, and `FakeRunner` lets them leave through `serve()` instead of handing them
to `done`, so that a test fails at once and names the promise, and akv never takes them for trouble of the store.
"""


class MisuseError(AssertionError):
    """A port was used in a way that it forbids. At fault: the code under test, or the test's own script."""


class UnregisteredBuffer(MisuseError):
    """A pool call names a buffer that was not registered. TCP would move the bytes all the same, RDMA would not."""


class CallLimitExceeded(MisuseError):
    """More calls of a kind were started than its limit and one waiting call allow."""


class UnorderedAccess(MisuseError):
    """Two accesses of the same memory, at least one of them a write, that no event orders.

    On hardware this is a race that mostly goes well. Attributes: `actor`, who made the later access ("host" or a stream's
    name); `place`, the page or the piece of a host buffer; `other`, who made the earlier one.
    """

    def __init__(self, actor: str, doing: str, place: str, other: str, did: str) -> None:
        self.actor = actor
        self.place = place
        self.other = other
        super().__init__(
            f"{actor} {doing} {place}, but nothing orders this behind {other}, which {did} it: let the copy wait for an event "
            f"of {other} that was recorded afterwards, or see that event complete first"
        )
