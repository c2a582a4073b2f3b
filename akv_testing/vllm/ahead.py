"""vLLM's asynchronous scheduling, its default on a GPU, on a CPU, for which vLLM turns it off.

A step is scheduled, and its pass planned, before the step in front of it is sampled. What overlaps on a GPU runs one after the
other here; the order of calls is the same, and that is what a connector sees.
"""

from typing import Any, Self

import torch


class _Instant:
    """A CUDA stream or event on a CPU, where whatever was queued has run."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def record(self, *args: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, *args: object) -> None:
        pass

    def query(self) -> bool:
        return True


def schedule_ahead(config: Any) -> None:
    """Turn it on in a `VllmConfig`, and give this process what vLLM's model runner then asks of CUDA."""
    config.scheduler_config.async_scheduling = True
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = cuda.stream = cuda.current_stream = _Instant
