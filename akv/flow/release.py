"""Last step: the request's pages are the engine's again, however its block ends (S7, D6).

`ownership/requests.py` decides when nothing touches the pages any more.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from anyio import move_on_after


@asynccontextmanager
async def ended_with_block(
    finished: Callable[[], Awaitable[None]], cancelled: Callable[[], Awaitable[None]], grace_s: float
) -> AsyncIterator[None]:
    """End a request with a block: `finished` after an ordinary end, `cancelled` after any other, shielded for `grace_s`
    seconds.

    **Cancellation:** in the block or while `finished` waits, the request is cancelled; the grace bounds the wait for its
    pages.
    """
    try:
        yield
        await finished()
    except BaseException:
        # An unshielded await here would never complete under cancellation, and the pages would leak.
        with move_on_after(grace_s, shield=True):
            await cancelled()
        raise
