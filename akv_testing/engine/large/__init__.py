"""A model of a realistic shape behind the reference engine, for measurements on a device: bfloat16, with windows or without.

`model.py` has the weights and what a layer computes but for attention, `places.py` says where KV lies in the pages,
`attention.py` reads it and attends, `decoding.py` computes the next token of many requests, under CUDA graphs where there is
CUDA, and `computer.py` puts them together as the engine's `Computer`. All of it runs on a CPU too, at small shapes.

Unlike the small model it batches what decodes: a request's last bits may depend on who is computed with it.
"""

from akv_testing.engine.large.computer import LargeComputer, open_pages
from akv_testing.engine.large.model import LargeModel
from akv_testing.engine.large.presets import LLAMA_8B, LLAMA_8B_WINDOWS, SMALL, SMALL_WINDOWS

__all__ = ["LLAMA_8B", "LLAMA_8B_WINDOWS", "SMALL", "SMALL_WINDOWS", "LargeComputer", "LargeModel", "open_pages"]
