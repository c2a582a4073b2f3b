"""The elements that pages are moved in."""

import torch

#: Bytes per element, and the dtype that moves that many at once. Wide elements matter: on a CPU torch indexes uint8 at an
#: eighth of the speed of memcpy and complex128 at its full speed. No kernel computes with them, so every bit pattern survives.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
WIDEST = max(WORDS)
