"""What the device does at best: its copy from pinned memory, SDPA's own throughput, and the engine's attention beside it."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from akv_testing.engine.config import EngineConfig
from akv_testing.engine.large.computer import LargeComputer
from akv_testing.engine.large.model import LargeModel
from akv_testing.engine.step import Chunk

#: Bytes of one copy. Large enough that starting it costs nothing.
_COPY_BYTES = 1 << 30


def pinned_copy_bytes_per_s(device: torch.device, nbytes: int = _COPY_BYTES) -> float:
    """Bytes that arrive per second from pinned host memory in one long copy. On a CPU that is a plain copy."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / _seconds(lambda: there.copy_(host, non_blocking=True), device)


def sdpa_flops(model: LargeModel, tokens: int) -> float:
    """Operations per second of SDPA by itself over a whole prompt, causal, as the model has heads."""
    config = model.config
    q, k, v = (
        torch.randn(1, heads, tokens, config.head_size, dtype=model.dtype, device=model.device)
        for heads in (config.heads, model.kv_heads, model.kv_heads)
    )

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.inference_mode():
        return _operations(model, 0, tokens) / _seconds(attend, model.device)


def engine_flops(config: EngineConfig, model: LargeModel, computer: LargeComputer, tokens: int) -> float:
    """Operations per second of one layer's attention over a prompt, in the engine's chunks: its pages are written and read.

    The cache must be nobody's: it is written to.
    """
    layer = next(layer for group in config.groups for layer in group.layers if not group.window_tokens)
    tables = tuple(tuple(range(-(-tokens // config.tokens_per_block))) for _ in config.groups)
    starts = range(0, tokens, config.chunk_tokens)
    chunks = [
        Chunk((0,) * min(config.chunk_tokens, tokens - start), start, tables, following=0, keep_logits=False)
        for start in starts
    ]
    q, k, v = (
        torch.randn(config.chunk_tokens, heads, model.config.head_size, dtype=model.dtype, device=model.device)
        for heads in (model.config.heads, model.kv_heads, model.kv_heads)
    )

    def attend() -> None:
        for chunk in chunks:
            count = len(chunk.tokens)
            computer.attend(layer, chunk, q[:count], k[:count], v[:count])

    return _operations(model, 0, tokens) / _seconds(attend, model.device)


def _operations(model: LargeModel, start: int, end: int) -> float:
    """Of the two products of attention, of what each query sees alone."""
    pairs = (end * (end + 1) - start * (start + 1)) / 2
    return 4 * pairs * model.config.heads * model.config.head_size


def _seconds(work: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """The median of a few runs behind one that does not count."""
    taken = []
    for _ in range(times + 1):
        _finish(device)
        began = time.perf_counter()
        work()
        _finish(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
