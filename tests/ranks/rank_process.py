"""One rank of a server, in a process of its own: a worker half on torch and Mooncake, told by frames on its standard input.

A frame is a length of four bytes, and so many bytes of msgpack. Each is answered by one.
"""

import sys
from typing import BinaryIO, TypeAlias

import anyio
import anyio.to_thread
import msgspec
import torch

from akv.plan.keys import shard_of
from akv.ranks import Worker, open_worker
from akv.values.layout import Layout
from akv_testing.server import page_content


class Carry(msgspec.Struct, tag=True):
    """Carry these orders out. Answered when the engine may go on."""

    orders: bytes


class Compute(msgspec.Struct, tag=True):
    """The forward: fill the pages of these blocks, by their hashes, in every layer group."""

    pages: list[tuple[bytes, int]]


class Report(msgspec.Struct, tag=True):
    """Answered by what ended since the last one."""


class Wrong(msgspec.Struct, tag=True):
    """Answered by the page of each group and block that does not hold what it stands for, as msgpack."""

    pages: list[tuple[bytes, int]]


Frame: TypeAlias = Carry | Compute | Report | Wrong


class Rank(msgspec.Struct):
    """What a rank is started with, on its command line."""

    rank: int
    settings: dict[str, object]
    layout: Layout
    #: Where its cache lies, as torch names devices.
    device: str
    pages: int


class Cache:
    """The rank's pages. `kernel` writes them on the stream that forwards run on."""

    def __init__(self, rank: Rank) -> None:
        self.layout, self.rank = rank.layout, rank.rank
        self.tensors = [
            [
                torch.zeros((rank.pages, region.bytes_per_page), dtype=torch.uint8, device=rank.device)
                for region in group.regions
            ]
            for group in rank.layout.groups
        ]

    def _content(self, block_hash: bytes, group: int) -> list[torch.Tensor]:
        regions = self.layout.groups[group].regions
        part = shard_of(self.layout, group, self.rank).name.encode()
        page = page_content(block_hash + part, group, self.layout.groups[group].bytes_per_page)
        whole = torch.frombuffer(bytearray(page), dtype=torch.uint8)
        return list(torch.split(whole, [region.bytes_per_page for region in regions]))

    def compute(self, pages: list[tuple[bytes, int]]) -> None:
        """The forward over these blocks."""
        for block_hash, page in pages:
            for group, tensors in enumerate(self.tensors):
                for tensor, content in zip(tensors, self._content(block_hash, group), strict=True):
                    tensor[page].copy_(content)

    def wrong(self, pages: list[tuple[bytes, int]]) -> list[tuple[int, int]]:
        """Group and page of what is not as it should be."""
        return [
            (group, page)
            for block_hash, page in pages
            for group, tensors in enumerate(self.tensors)
            if any(
                not torch.equal(tensor[page].cpu(), content)
                for tensor, content in zip(tensors, self._content(block_hash, group), strict=True)
            )
        ]


def read_frame(stream: BinaryIO) -> bytes:
    """The next frame; empty at the end."""
    size = stream.read(4)
    return stream.read(int.from_bytes(size, "little")) if len(size) == 4 else b""


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """One frame."""
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


async def serve(rank: Rank) -> None:
    """Until the input ends."""
    cache = Cache(rank)
    async with open_worker(rank.settings, rank.layout, cache.tensors, rank=rank.rank) as worker:
        write_frame(sys.stdout.buffer, worker.hello)
        while data := await anyio.to_thread.run_sync(read_frame, sys.stdin.buffer):
            frame = msgspec.msgpack.decode(data, type=Frame)
            write_frame(sys.stdout.buffer, await answer(worker, cache, frame))


async def answer(worker: Worker, cache: Cache, frame: Frame) -> bytes:
    """What the frame asks for."""
    match frame:
        case Carry():
            await worker.carry_out(frame.orders)
            return b""
        case Compute():
            cache.compute(frame.pages)
            return b""
        case Report():
            return worker.take_report()
        case Wrong():
            return msgspec.msgpack.encode(cache.wrong(frame.pages))


if __name__ == "__main__":
    anyio.run(serve, msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Rank))
