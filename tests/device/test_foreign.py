"""An engine's memory by address: the tensor is the memory itself, rows as far apart as the engine has them (R6, M4)."""

import numpy as np
import torch

from akv.device import joined_stream, open_torch_device, rows_at
from akv.values.layout import LayerGroup, Layout, Region


def test_a_tensor_by_address_is_the_memory_itself() -> None:
    memory = np.arange(6 * 24, dtype=np.uint8).reshape(6, 24)
    tensor = rows_at(int(memory.ctypes.data) + 8, 12, 24, 6, cuda=False)
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == ((6, 12), (24, 1), torch.uint8)
    assert tensor[5].tolist() == list(range(5 * 24 + 8, 5 * 24 + 20))
    tensor[2] = 7
    assert memory[2, 8:20].tolist() == [7] * 12
    assert memory[2, :8].tolist() + memory[2, 20:].tolist() == [*range(48, 56), *range(68, 72)]


def test_it_is_taken_as_a_cache() -> None:
    memory = np.zeros((4, 64), dtype=np.uint8)
    layout = Layout(
        tokens_per_block=4,
        groups=(
            LayerGroup(
                layers=(0,),
                dtype="bfloat16",
                kv_heads=1,
                head_size=1,
                regions=tuple(Region(name=name, bytes_per_page=16) for name in ("keys", "values")),
            ),
        ),
    )
    base = int(memory.ctypes.data)
    device = open_torch_device(layout, [[rows_at(base + 16 * part, 16, 64, 4, cuda=False) for part in range(2)]])
    assert device.page_counts == (4,)
    device.close()


def test_on_a_CPU_there_is_no_stream_to_join() -> None:
    joined = joined_stream(cuda=False)
    assert joined.stream is None
    joined.behind()
    joined.before()
