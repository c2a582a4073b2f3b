"""Every error that akv raises, and for each: who is at fault, and what the caller does about it.

A failed *save* is never an exception: it is an outcome and an event. A failed *load* always surfaces, to its own request.
"""


class AkvError(Exception):
    """Root of the tree. Catch it to catch whatever akv raises on purpose."""


class SettingsError(AkvError):
    """The configuration is wrong. At fault: whoever wrote it. Fix the named field and start again; nothing was opened.

    Attributes: `field`, the dotted name of the setting; `value`, what was found there; `fix`, what to write instead.
    """

    def __init__(self, field: str, value: object, why: str, fix: str) -> None:
        self.field = field
        self.value = value
        self.fix = fix
        super().__init__(f"setting {field!r} is {value!r}: {why}. {fix}")


class DependencyError(AkvError):
    """A package or a system library that this configuration needs is missing. At fault: the installation.

    The text names the extra (`pip install 'akv[...]'`) or the system package that brings it.
    """


class PoolError(AkvError):
    """The pool could not be opened. At fault: the deployment (master down, address wrong, memory short), never a request.

    Once the connector is open, trouble with the pool never raises this: lookups miss, saves are dropped, loads fail alone.
    """


class TokenError(AkvError, ValueError):
    """A token sequence cannot be hashed. At fault: the caller of this request. The text names positions, never token values.

    Nothing was appended; the request can go on with a corrected sequence, or without the cache.
    """


class EngineContractError(AkvError):
    """The engine's adapter broke the protocol of a request or of a pass. At fault: the adapter's author.

    Raised at the call that broke it, for the request concerned. Nothing was taken, skipped or clamped: the connector goes on,
    and every other request is untouched.
    """


class NotOpenError(AkvError):
    """The connector is used before it opened, after it closed, in a forked child or in another thread. At fault: the embedding
    program.

    A connector lives inside `async with open_connector(...)`, in the event loop that opened it. Nothing happened.
    """


class ConnectorBroken(AkvError):
    """The connector stopped because of a fault that it cannot repair. At fault: akv, or an engine that misreports its passes.

    Every call and every wait ends with this from then on. Leave the connector's block; requests go on without a cache, and
    without the pages that `Connector.touched_pages` still names then.
    """


class PagesLost(ConnectorBroken):
    """A service failed, and nobody can see any more whether a copy has ended that touches this request's pages. At fault: akv.

    Only with `on_failure = "degrade"`, where everything else goes on without a cache. The request is over for the connector:
    its id may be used again, its pages must not while the process lives (`Connector.touched_pages` names them too).
    Attributes: `request_id`; `pages`, the pages per layer group.
    """

    def __init__(self, request_id: str, incarnation: int, pages: tuple[tuple[int, ...], ...]) -> None:
        self.request_id = request_id
        self.incarnation = incarnation
        self.pages = pages
        super().__init__(
            f"after a service failed nobody can see whether a copy still touches {sum(map(len, pages))} pages of request "
            f"{request_id!r} (`pages`): keep them out of use as long as this process lives, and compute the request in others"
        )


class DeviceError(AkvError):
    """The device failed work that was queued on it. At fault: the device, its driver, or the kernels that ran before.

    Adapters of the device raise it; a load ends with it as FAILED, a save as refused. The original error is its `__cause__`.
    """


class SegmentUnusable(AkvError):
    """A segment of this host is not read directly: its file is not what the register says. At fault: whoever wrote the entry,
    or changed the file. Its pages are staged.
    """


class SegmentNotReady(AkvError):
    """A segment of this host cannot be read directly yet: its owner is still allocating it. Its pages are staged meanwhile."""


class LoadEnded(AkvError):
    """Base of the two ways in which `Load.wait()` ends without the pages being filled.

    Nothing writes into them any more, but for those in `quarantined`: pages per layer group that stay the connector's until
    `Connector.completed()` delivers their `PagesReleased`. Empty unless the engine declared `keeps_quarantined_pages`.
    """

    quarantined: tuple[tuple[int, ...], ...] = ()


class LoadFailed(LoadEnded):
    """The pool did not deliver a page. At fault: nobody in this process (evicted, holder died, deadline).

    The pages are the engine's again and their content is undefined. Free them and restart this request without the offer.
    Attributes: `key`, the first page that was missing, empty if none was asked for; `reason`, one word for it.
    """

    def __init__(self, request_id: str, key: str, reason: str, quarantined: tuple[tuple[int, ...], ...] = ()) -> None:
        self.request_id = request_id
        self.key = key
        self.reason = reason
        self.quarantined = quarantined
        super().__init__(
            f"the load of request {request_id!r} failed ({reason}): its pages are free again{_but_for(quarantined)} and hold "
            "no usable KV; restart the request without this offer"
        )


class LoadCancelled(LoadEnded):
    """The request was cancelled, finished or preempted while its load was under way. At fault: nobody.

    The pages are the engine's again and their content is undefined. The request is not restarted because of this.
    """

    def __init__(self, request_id: str, quarantined: tuple[tuple[int, ...], ...] = ()) -> None:
        self.request_id = request_id
        self.quarantined = quarantined
        super().__init__(
            f"the load of request {request_id!r} was cancelled: its pages are free again{_but_for(quarantined)} and hold no "
            "usable KV"
        )


def _but_for(quarantined: tuple[tuple[int, ...], ...]) -> str:
    count = sum(map(len, quarantined))
    return f", but for {count} pages (`quarantined`) that completed() gives back with PagesReleased," if count else ""
