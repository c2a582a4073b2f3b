"""Last step: the request's pages are the engine's again, however its block ends (S7, D6).

`ownership/requests.py` decides when nothing touches the pages any more.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from anyio import current_time, get_cancelled_exc_class, move_on_after


@asynccontextmanager
async def ended_with_block(
    finished: Callable[[], Awaitable[object]],
    cancelled: Callable[[], Awaitable[None]],
    released: Callable[[], bool],
    grace_s: float,
) -> AsyncIterator[None]:
    """End a request with a block: `finished` after an ordinary end; after any other `cancelled`, until `released` says so or
    `grace_s` seconds have passed.

    **Cancellation:** in the block or while `finished` waits, the request is cancelled, and nothing cuts the wait for its pages
    short but the grace: neither an outer scope nor asyncio's own cancellation, however often it comes.
    """
    try:
        yield
        await finished()
    except BaseException as error:
        cancellation: BaseException | None = None
        ends_at = current_time() + grace_s
        while not released() and (left_s := ends_at - current_time()) > 0:
            try:
                # Unshielded, an await here would never complete under cancellation, and the pages would leak.
                with move_on_after(left_s, shield=True):
                    await cancelled()
            except get_cancelled_exc_class() as again:  # noqa: ASYNC103 - raised below, once the pages are free
                # asyncio's own cancellation goes through shields. To leave now would give pages back under a copy.
                cancellation = again
        if cancellation is not None and not isinstance(error, get_cancelled_exc_class()):
            # As Python has it: a cancellation takes the place of an error, and names it as its context.
            raise cancellation from error  # noqa: ASYNC104 - it is one
        raise
