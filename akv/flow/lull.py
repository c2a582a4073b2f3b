"""When a load's calls disturb the engine least: a moment behind the beginning of a pass, while the device computes it.

What a call does in Python takes the interpreter lock from the engine's own threads. They need it at both ends of a forward: to
queue it, to see its end, to plan the next one. In between they wait for the device. Measured on an H200: steps of decoding of
7.8 ms took 1 to 3 ms longer where a call of 64 pages met an end of theirs, and no longer where it did not.
"""

from anyio import Event, current_time, move_on_after, sleep

#: Seconds behind a pass's plan: by then its kernels are queued. A timer wakes no finer.
SETTLED_S = 0.001
#: The last moment for a call, which takes 2 to 4 ms, to begin in a step of decoding. Behind it the next pass is waited for.
LATEST_S = 0.003
#: Seconds that a call waits at most. A pass of twice that age computes a prompt, or the engine computes nothing.
PATIENCE_S = 0.01


class Lulls:
    """Knows when passes begin. For loads of many calls; what one call more costs a short load is not worth a wait."""

    def __init__(self, *, useful: bool) -> None:
        """`useful`: calls are shorter than lulls, since copies run behind them."""
        self._useful = useful
        self._began = float("-inf")
        #: Made by whoever waits for the next pass.
        self._begins: Event | None = None

    @property
    def matter(self) -> bool:
        """Whether the engine computes short passes, one after the other: decoding is going on."""
        return self._useful and current_time() - self._began <= 2 * PATIENCE_S

    def pass_begins(self) -> None:
        """The engine has planned a pass: its forward comes next."""
        self._began = current_time()
        if self._begins is not None:
            self._begins.set()
            self._begins = None

    async def wait(self) -> None:
        """Return in the next lull, within `PATIENCE_S` and `SETTLED_S`; at once where none matters.

        **Cancellation:** nothing is held.
        """
        if not self.matter:
            return
        age = current_time() - self._began
        if age > LATEST_S:
            with move_on_after(PATIENCE_S) as timer:
                self._begins = self._begins or Event()
                await self._begins.wait()
            if timer.cancelled_caught:
                return
            age = 0.0
        if age < SETTLED_S:
            await sleep(SETTLED_S - age)
