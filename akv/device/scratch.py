"""The way between pages and pinned host memory: through device memory, in two halves, copies beside kernels."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from akv.device import moves
from akv.device.caches import GroupCache
from akv.device.device_memory import device_bytes


class Scratch:
    """Memory on the device that the pages of one stream pass through, and a second stream for kernels beside its copies."""

    def __init__(self, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Raises torch's OutOfMemoryError."""
        self._memory = device_bytes(nbytes, stream)
        self._beside: torch.cuda.Stream = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def move(self, cache: GroupCache, pages: torch.Tensor, slots: Sequence[int], host: torch.Tensor, *, to_host: bool) -> None:
        """Copy between pages and as many ascending slots of pinned host memory, in the order of the current stream.

        While the current stream copies between one half of the scratch and the host, kernels on the second stream exchange the
        other one with the pages: the way to the host, by far the slower one, is never left idle. A scratch with room for one
        page alone has no halves. If it raises, nothing runs on the second stream any more.
        """
        try:
            self._move(cache, pages, slots, host, to_host=to_host)
        except BaseException:
            with suppress(RuntimeError):  # a device that failed for good runs nothing any more
                self._beside.synchronize()
            raise

    def _move(
        self, cache: GroupCache, pages: torch.Tensor, slots: Sequence[int], host: torch.Tensor, *, to_host: bool
    ) -> None:
        page_bytes, beside = cache.bytes_per_page, self._beside
        at_once = max(1, self._memory.numel() // page_bytes // 2)
        parts: Sequence[torch.Tensor] = torch.split(self._memory, at_once * page_bytes)[:2]
        current = torch.cuda.current_stream(self._memory.device)
        index = moves.indices(cache, pages)
        beside.wait_stream(current)
        #: For each half, the end of what used it last.
        left: list[torch.cuda.Event | None] = [None for part in parts if part.numel() == at_once * page_bytes]
        for number, begin in enumerate(range(0, len(slots), at_once)):
            at = number % len(left)
            some = slots[begin : begin + at_once]
            block = parts[at][: len(some) * page_bytes]
            for stream in (beside, current) if to_host else (current, beside):
                if (passed := left[at]) is not None:
                    stream.wait_event(passed)
                with torch.cuda.stream(stream):
                    if stream is beside:
                        table = block.view(len(some), page_bytes)
                        moves.exchange_pages(cache, index[begin : begin + len(some)], table, to_host=to_host)
                    else:
                        moves.copy_runs(block, some, host, page_bytes, to_host=to_host)
                left[at] = stream.record_event()
        current.wait_stream(beside)
