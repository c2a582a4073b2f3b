"""Host memory for pages, as SGLang's host pools lay it out, with an owner for every page.

A page that is free, or that another request got, holds what the stand-in wrote there. So a backend that writes into a page
after it said that it was done is found out, however late it writes.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from akv_testing.engines.sglang.errors import BackendFault

#: What free pages hold.
FREE = 0xF7
#: What pages hold that a prefetch may fill.
EMPTY = 0xE3

Indices = NDArray[np.int64]


class FlatPage:
    """A copy of a page, of which a backend needs what a tensor tells it."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array

    def data_ptr(self) -> int:
        """Where it begins."""
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        """Its elements, which are bytes."""
        return int(self.array.size)

    def element_size(self) -> int:
        """Bytes of one."""
        return 1

    def is_contiguous(self) -> bool:
        """Whether its bytes lie one behind the other."""
        return bool(self.array.flags.c_contiguous)


class HostPool:
    """A pool of K and V pages. `layout`: "page_first", "page_first_direct" or "layer_first".

    Sizes are tiny: a token has 4 bytes in each of `heads` heads, per layer and for K and V each.
    """

    #: K and V, each of which lies in one half of the buffer.
    halves = 2

    def __init__(
        self, *, layout: str = "page_first", pages: int = 64, page_size: int = 4, layers: int = 3, heads: int = 2
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        self.layer_num = layers
        self.head_num = heads
        self.head_dim = 4
        self.dtype = "uint8"
        self.page_num = pages
        self.size = pages * page_size
        token = heads * self.head_dim
        shapes = {
            "page_first": (self.halves, pages, page_size, layers, token),
            "page_first_direct": (self.halves, pages, layers, page_size, token),
            "layer_first": (self.halves, layers, pages, page_size, token),
        }
        #: A page stands at its index along the axis of pages. Other layouts cannot say where a page lies.
        self.kv_buffer: Any = np.full(shapes.get(layout, shapes["page_first"]), FREE, dtype=np.uint8)
        self._axis = 2 if layout == "layer_first" else 1
        self._free = list(range(pages))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.kv_buffer.nbytes // self.page_num)

    @property
    def available(self) -> int:
        """Pages that are free."""
        return len(self._free)

    def alloc(self, pages: int) -> Indices | None:
        """So many pages, as the indices of all their tokens; None if there are not enough. They hold `EMPTY`."""
        if pages > len(self._free):
            return None
        taken, self._free = self._free[:pages], self._free[pages:]
        for page in taken:
            self._check(page, "free", FREE)
            self._fill(page, EMPTY)
        spans = [np.arange(page * self.page_size, (page + 1) * self.page_size) for page in taken]
        return np.concatenate([*spans, np.zeros(0, dtype=np.int64)]).astype(np.int64)

    def free(self, indices: Indices) -> None:
        """Give pages back: from now on nobody but the stand-in writes there."""
        for page in self.pages_of(indices):
            if page in self._free:
                raise BackendFault(f"page {page} was given back twice")
            self._fill(page, FREE)
            # The next one that is taken: a late write is to hit somebody.
            self._free.insert(0, page)

    def check_free_pages(self) -> None:
        """Raise BackendFault if somebody wrote into a page that is free."""
        for page in self._free:
            self._check(page, "free", FREE)

    def pages_of(self, indices: Indices) -> list[int]:
        """The pages whose tokens these are."""
        return [int(index) // self.page_size for index in indices[:: self.page_size]]

    def read(self, page: int) -> bytes:
        """A page's bytes, its pieces one behind the other."""
        return bytes(np.take(self.kv_buffer, page, axis=self._axis).tobytes())

    def write(self, page: int, data: bytes) -> None:
        """Write a page, as a copy from the device does."""
        view = np.moveaxis(self.kv_buffer, self._axis, 0)[page]
        view[...] = np.frombuffer(data, dtype=np.uint8).reshape(view.shape)

    def content(self, page_hash: str, rank: int) -> bytes:
        """What a page of that hash must hold on a rank."""
        return content_of(f"{type(self).__name__} {self.layout} {rank} {page_hash}", self.page_bytes)

    def get_page_buffer_meta(self, indices: Sequence[int] | Indices) -> tuple[list[int], list[int]]:
        """The address and size of each piece of each page. Raises ValueError for a layout that is not known."""
        if len(indices) % self.page_size:
            raise AssertionError("not whole pages")
        if self.layout not in {"page_first", "page_first_direct", "layer_first"}:
            raise ValueError(f"Unsupported layout: {self.layout}")
        addresses: list[int] = []
        sizes: list[int] = []
        layers = range(self.layer_num) if self.layout == "layer_first" else (None,)
        for index in list(indices)[:: self.page_size]:
            page = int(index) // self.page_size
            for layer in layers:
                for half in range(self.halves):
                    piece = self.kv_buffer[half, page] if layer is None else self.kv_buffer[half, layer, page]
                    addresses.append(int(piece.ctypes.data))
                    sizes.append(int(piece.nbytes))
        return addresses, sizes

    def get_data_page(self, index: int) -> FlatPage:
        """A flat copy of the page that begins at an index."""
        return FlatPage(np.frombuffer(self.read(int(index) // self.page_size), dtype=np.uint8).copy())

    def get_dummy_flat_data_page(self) -> FlatPage:
        """An empty flat page."""
        return FlatPage(np.zeros(self.page_bytes, dtype=np.uint8))

    def set_from_flat_data_page(self, index: int, data_page: FlatPage) -> None:
        """Fill the page that begins at an index from a flat one."""
        self.write(int(index) // self.page_size, data_page.array.tobytes())

    def _fill(self, page: int, byte: int) -> None:
        np.moveaxis(self.kv_buffer, self._axis, 0)[page] = byte

    def _check(self, page: int, state: str, byte: int) -> None:
        if set(self.read(page)) != {byte}:
            raise BackendFault(f"page {page} was written while it was {state}: a transfer went on behind its end")


class LatentHostPool(HostPool):
    """A pool of latents, as of an MLA model: one half, and every tensor-parallel rank holds the same."""

    halves = 1

    def content(self, page_hash: str, rank: int) -> bytes:
        """The same on every rank."""
        del rank
        return super().content(page_hash, 0)


class StatePool(HostPool):
    """A pool of states: one for each page of KV at which a sequence can resume, and of another size than a page."""

    def __init__(self, *, pages: int = 8, layers: int = 2) -> None:
        super().__init__(layout="page_first", pages=pages, page_size=1, layers=layers, heads=5)


def content_of(name: str, nbytes: int) -> bytes:
    """Bytes that follow from a name and from nothing else."""
    stream = hashlib.shake_128(name.encode())
    return stream.digest(nbytes)
