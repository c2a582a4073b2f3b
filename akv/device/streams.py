"""CUDA's streams and events as akv uses them. On a CPU a copy has ended when its call returns, and little is left of them."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from akv.device.scratch import Scratch
from akv.errors import DeviceError, SettingsError
from akv.ports.device import PassEvent


class TorchEvent:
    """A point in a CUDA stream's work; on a CPU a point that has passed, because copies there end before they return."""

    def __init__(self, event: torch.cuda.Event | None = None, holds: object = None) -> None:
        """`holds`: what must stay alive until the work has completed."""
        self.event = event
        self._holds = holds

    def query(self) -> bool:
        """Whether everything before this point has completed. Raises DeviceError if the device failed."""
        event = self.event  # read once: a loader's thread and the poller may ask at the same time
        if event is not None:
            try:
                done = event.query()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            except RuntimeError as error:
                raise DeviceError(f"the device failed before this point of its work: {error}") from error
            if not done:
                return False
            self.event = None
            self._holds = None
        return True


class TorchStream:
    """A stream for copies, with its scratch on the device. On a CPU only a name and a lock."""

    def __init__(self, name: str, device: torch.device, scratch_bytes: int) -> None:
        self._name = name
        #: Held while a call issues its copies: two threads on one stream would overwrite each other's scratch.
        self.lock = threading.Lock()
        self.cuda: torch.cuda.Stream | None = None
        self.scratch: Scratch | None = None
        if device.type == "cuda":
            self.cuda = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.scratch = Scratch(scratch_bytes, self.cuda)

    @property
    def name(self) -> str:
        """For logs."""
        return self._name

    def close(self) -> None:
        """Give the scratch back. Only when no copy is queued or running."""
        self.cuda = self.scratch = None

    def record(self, holds: object) -> TorchEvent:
        """Mark its present end. `holds`: what must stay alive until then."""
        return TorchEvent() if self.cuda is None else TorchEvent(self.cuda.record_event(), holds)

    def entered(self) -> AbstractContextManager[object]:
        """Make it the current stream of this thread, and its device the current device."""
        return nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)


def execution_stream(stream: Any, device: torch.device) -> torch.cuda.Stream | None:
    """The stream of the engine's kernels: the given one, or the current one of the caches' device; None on a CPU."""
    if device.type == "cpu":
        if stream is not None:
            raise SettingsError("stream", stream, "the caches are on a CPU, which has no streams", "Leave it out.")
        return None
    if stream is None:
        return torch.cuda.current_stream(device)
    if not isinstance(stream, torch.cuda.Stream) or stream.device != device:
        raise SettingsError("stream", stream, f"it is no stream of {device}", "Pass the torch.cuda.Stream of the forwards.")
    return stream


@contextmanager
def leaving_nothing_behind(name: str, *streams: torch.cuda.Stream | None) -> Iterator[None]:
    """If queueing fails half-way, end what was queued: there will be no event that could tell when it ends by itself.

    `name`: of the stream that the copies belong to.
    """
    try:
        yield
    except BaseException as error:
        for stream in streams:
            if stream is not None:
                with suppress(RuntimeError):  # a device that failed for good runs nothing any more
                    stream.synchronize()
        if isinstance(error, RuntimeError):  # what torch raises for all that a device reports, out of memory included
            raise DeviceError(f"copies could not be queued on stream {name!r}: {error}") from error  # noqa: ASYNC104 - no cancellation
        raise


def wait(stream: torch.cuda.Stream | None, event: PassEvent) -> None:
    """Order what is queued on the stream from now on behind an event. Raises TypeError if it is another device's."""
    if not isinstance(event, TorchEvent):
        raise TypeError("an event of another device orders nothing here")
    pending = event.event  # read once: the poller may clear it at any moment, when there is nothing to wait for any more
    if stream is not None and pending is not None:
        stream.wait_event(pending)
