"""The pages of one of SGLang's host pools: where their bytes lie, as the pool itself says, and the copies to and from slots.

A pool that is asked for pages names the addresses and sizes of their pieces: two, K and V, where a page is contiguous, and two
for each layer where it is not. A slot holds them one behind the other, so that every layout which a pool can describe is
served. Addresses are used while SGLang waits in the call that named the pages, and are not kept.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from akv.engines.sglang.names import PageShape
from akv.errors import EngineContractError, SettingsError
from akv.ports.device import HostBuffer

#: What a host pool says of itself, if it does, that changes the bytes of its pages beside their sizes.
FACTS = (
    "storage_format_tag",
    "start_layer",
    "end_layer",
    "layer_num",
    "target_layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "temporal_dtype",
    "conv_dtype",
    "temporal_state_elem_size",
    "conv_state_elem_sizes",
    "num_mamba_layers",
)
#: The class of pools that hold latents, of which every tensor-parallel rank has the same.
_LATENT_CLASS = "MLATokenToKVPoolHost"
#: Side pools that differ from rank to rank though the model's KV does not: states are split over the ranks, and a drafter's KV
#: is unless it holds latents itself.
_SPLIT = frozenset({"mamba"})
_DRAFTS = frozenset({"draft", "draft_indexer", "draft_swa"})


class Piece(NamedTuple):
    """Some bytes of a page."""

    address: int
    nbytes: int


#: The pieces of one page, in the pool's order.
PagePlace = Sequence[Piece]


class HostPages:
    """One host pool. Raises SettingsError (fault of whoever configured SGLang) for a pool that cannot describe its pages."""

    def __init__(self, pool: Any, name: str, *, flat: bool = False) -> None:
        """`flat`: SGLang copies pages out of this pool, and into it, itself, and hands over what it copied."""
        self._pool = pool
        self.name = name
        self.tokens = int(getattr(pool, "page_size", 1) or 1)
        layout = str(getattr(pool, "layout", ""))
        flat_bytes = _tensor_bytes(pool.get_dummy_flat_data_page()) if flat else 0
        first = [Piece(0, flat_bytes)] if flat else self._pieces_of_first_page(layout)
        self.shape = PageShape(
            pool=name,
            kind=type(pool).__name__,
            layout=layout,
            dtype=str(getattr(pool, "dtype", "")),
            tokens=self.tokens,
            pieces=tuple(piece.nbytes for piece in first),
            order=tuple(sorted(range(len(first)), key=lambda index: first[index].address)),
            facts=tuple((fact, str(getattr(pool, fact))) for fact in FACTS if getattr(pool, fact, None) is not None),
            access="flat" if flat else "pieces",
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.shape.page_bytes

    def is_replicated(self, model_is: bool) -> bool:
        """Whether every tensor-parallel rank holds the same bytes; `model_is`: whether it is so for the model's own KV."""
        # Where layers are spread over the ranks a page holds other layers on each.
        if not model_is or self.name in _SPLIT or getattr(self._pool, "_layer_shard_enabled", False):
            return False
        return self.name not in _DRAFTS or any(kind.__name__ == _LATENT_CLASS for kind in type(self._pool).__mro__)

    def places(self, indices: Any, count: int) -> list[PagePlace]:
        """Where the pages lie that begin at these indices: a tensor of `count * tokens` of them.

        Raises EngineContractError (fault of the caller) if they are not so many, or not of the pool's own shape.
        """
        given = 0 if indices is None else len(indices)
        if given != count * self.tokens:
            raise EngineContractError(
                f"{count} pages of pool {self.name!r} have {count * self.tokens} indices, at {self.tokens} a page, and "
                f"{given} were given"
            )
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        pieces = len(self.shape.pieces)
        if len(addresses) != len(sizes) or tuple(sizes) != self.shape.pieces * count:
            raise EngineContractError(f"pool {self.name!r} describes a page in another way than when it was registered")
        each = [Piece(address, nbytes) for address, nbytes in zip(addresses, sizes, strict=True)]
        return [each[at : at + pieces] for at in range(0, len(each), pieces)]

    def _pieces_of_first_page(self, layout: str) -> list[Piece]:
        # Some pools reckon with indices as with a tensor. Imported here: a storage that is never attached needs no torch.
        from akv.device.indices import first_indices  # noqa: PLC0415

        try:
            addresses, sizes = self._pool.get_page_buffer_meta(first_indices(self.tokens))
        except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise SettingsError(
                "hicache_mem_layout",
                layout,
                f"SGLang's host pool {self.name!r} ({type(self._pool).__name__}) cannot say where the bytes of a page lie "
                f"({type(error).__name__}: {error})",
                "Start SGLang with --hicache-mem-layout page_first, or page_first_direct with --hicache-io-backend direct.",
            ) from error
        return [Piece(int(address), int(nbytes)) for address, nbytes in zip(addresses, sizes, strict=True)]


def place_of_tensor(tensor: Any, page_bytes: int) -> PagePlace:
    """Where a flat page lies that SGLang copied itself. Raises EngineContractError for one that is not such a page."""
    if not tensor.is_contiguous() or _tensor_bytes(tensor) != page_bytes:
        raise EngineContractError(
            f"a flat page of {_tensor_bytes(tensor)} bytes was given, and those of this host pool are contiguous and have "
            f"{page_bytes}"
        )
    return (Piece(tensor.data_ptr(), page_bytes),)


def base_of(buffer: HostBuffer) -> int:
    """The address of a staging buffer's memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer.view()))


def copy_into_slots(places: Iterable[PagePlace], base: int, offsets: Iterable[int]) -> None:
    """Copy pages into slots, each to its offset. Lets go of the interpreter lock."""
    for place, offset in zip(places, offsets, strict=True):
        at = base + offset
        for address, nbytes in place:
            ctypes.memmove(at, address, nbytes)
            at += nbytes


def copy_from_slots(places: Iterable[PagePlace], base: int, offsets: Iterable[int]) -> None:
    """Copy slots into pages. Lets go of the interpreter lock."""
    for place, offset in zip(places, offsets, strict=True):
        at = base + offset
        for address, nbytes in place:
            ctypes.memmove(address, at, nbytes)
            at += nbytes


def _tensor_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
