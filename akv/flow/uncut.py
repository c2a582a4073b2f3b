"""Waiting that no cancellation cuts short, for the few steps after which somebody else may use the memory."""

from collections.abc import Awaitable, Callable

from anyio import CancelScope, get_cancelled_exc_class
from anyio.lowlevel import checkpoint_if_cancelled


async def uncut(wait: Callable[[], Awaitable[object]], done: Callable[[], bool]) -> None:
    """Wait, again and again, until `done()`; only for what ends soon by itself.

    **Cancellation:** raised once `done()`: neither an outer scope nor asyncio's own cancellation ends the wait.
    """
    cancellation: BaseException | None = None
    while not done():
        try:
            with CancelScope(shield=True):
                await wait()
        except get_cancelled_exc_class() as error:  # noqa: ASYNC103 - raised below, once it is done
            # asyncio's own cancellation goes through shields.
            cancellation = error
    if cancellation is not None:
        raise cancellation  # noqa: ASYNC104 - it is one
    await checkpoint_if_cancelled()
