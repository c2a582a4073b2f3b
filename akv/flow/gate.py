"""Whether the pool may be asked at this moment (O7). In a connector the circuit breaker of `services/breaker.py` says so."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from anyio import CancelScope

from akv.plan.breaker import Waited


class PoolGate(Protocol):
    """Asked before each store call, and told of waits in vain."""

    def lets_through(self) -> bool:
        """Whether a store call may begin now."""
        ...

    def timed_out(self, waited: Waited) -> None:
        """A deadline passed while a store call was under way."""
        ...

    def ending_waits(self) -> AbstractContextManager[CancelScope]:
        """A scope that is cancelled if the gate shuts meanwhile; `cancelled_caught` tells."""
        ...


class OpenGate:
    """A gate that never shuts, for a flow that has no breaker."""

    def lets_through(self) -> bool:
        """Always."""
        return True

    def timed_out(self, waited: Waited) -> None:
        """Counts nothing."""

    @contextmanager
    def ending_waits(self) -> Iterator[CancelScope]:
        """Nothing cancels it."""
        with CancelScope() as scope:
            yield scope
