"""A scheduler here, ranks in processes of their own, a real master: the halves say everything in bytes that travel."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from akv.plan.identity import Hashing
from akv.ranks import Scheduler, open_scheduler
from akv.request import Request
from akv.values.layout import Layout
from akv.values.messages import LoadState
from akv.values.requests import LoadCompleted, Scheduled
from akv.values.scope import EMPTY_SCOPE
from akv_testing.master import running_master
from akv_testing.ports import tiny_layout
from akv_testing.ranked_server import ranked_layout

from .rank_process import Carry, Compute, Frame, Rank, Report, Wrong

pytestmark = [pytest.mark.mooncake, pytest.mark.anyio]

BLOCKS, PAGES = 12, 64
#: Every pair of devices that this machine has.
DEVICES = [
    pytest.param(["cpu", "cpu"], id="cpu"),
    *([pytest.param(["cuda:0", "cuda:0"], id="one gpu", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []),
    *([pytest.param(["cuda:0", "cuda:1"], id="two gpus", marks=pytest.mark.cuda)] if torch.cuda.device_count() > 1 else []),
]


@pytest.fixture
def anyio_backend() -> str:
    """One loop: what is looked at are bytes, and the same is tried on the fakes on every loop."""
    return "asyncio"


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with running_master() as (address, _):
        yield address


class Ranks:
    """The processes of a server's ranks, and the way to them and back."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._ways = [(process.stdin, BufferedByteReceiveStream(process.stdout)) for process in processes if process.stdout]

    async def hello(self) -> list[bytes]:
        """What each says of itself."""
        return [await self._read(way) for _, way in self._ways]

    async def tell(self, frame: Frame) -> list[bytes]:
        """The same to each rank, and what each answers."""
        data = msgspec.msgpack.encode(frame)
        for stdin, _ in self._ways:
            assert stdin is not None
            await stdin.send(len(data).to_bytes(4, "little") + data)
        return [await self._read(way) for _, way in self._ways]

    @staticmethod
    async def _read(way: BufferedByteReceiveStream) -> bytes:
        size = int.from_bytes(await way.receive_exactly(4), "little")
        return await way.receive_exactly(size) if size else b""


class Server:
    """The engine: it takes steps, and carries what the halves say."""

    def __init__(self, kv: Scheduler, ranks: Ranks, layout: Layout) -> None:
        self.kv, self.ranks = kv, ranks
        self._hashing = Hashing(layout.tokens_per_block, 0, "akv", b"")
        self._free = list(range(PAGES))
        self._groups = len(layout.groups)
        self._tokens_per_block = layout.tokens_per_block

    async def step(self) -> None:
        """Down to every rank, and back."""
        if orders := self.kv.take_orders():
            await self.ranks.tell(Carry(orders))
        for report in await self.ranks.tell(Report()):
            self.kv.take_report(report)

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not holds():
                await self.step()
                await anyio.sleep(0.001)

    def pages(self, tokens: Sequence[int], first: int = 0) -> tuple[list[list[int]], list[tuple[bytes, int]]]:
        """A page table, and each block's hash with its page from `first` on."""
        chain = self._hashing.chain(EMPTY_SCOPE, tokens)
        hashes = chain.hashes(0, len(tokens) // self._tokens_per_block)
        table = [self._free.pop(0) for _ in range(-(-len(tokens) // self._tokens_per_block))]
        return [table] * self._groups, list(zip(hashes, table, strict=False))[first:]

    async def compute(self, request: Request, tokens: Sequence[int]) -> None:
        """One pass over all of it, and the request's end."""
        table, blocks = self.pages(tokens)
        plan = self.kv.plan_pass([Scheduled(request=request, computed_before=0, tokens=len(tokens), pages=table)])
        await self.step()
        await self.ranks.tell(Compute(blocks))
        await self.kv.after_forward(plan)
        request.finish()
        await self.until(lambda: request.closed)

    async def load(self, name: str, tokens: Sequence[int]) -> tuple[int, LoadCompleted | None, list[Any]]:
        """Tokens that were offered, how their load ended, and what of them is wrong, by rank."""
        request = self.kv.open_request(name, tokens)
        offer = await request.lookup()
        if not offer.tokens:
            return 0, None, []
        table, blocks = self.pages(tokens)
        load = request.reserve(offer, offer.tokens, table)
        await self.until(lambda: load.state is not None)
        wrong = await self.ranks.tell(Wrong(blocks[: offer.tokens // self._tokens_per_block]))
        (ended,) = [end for end in self.kv.completed() if isinstance(end, LoadCompleted)]
        request.finish()
        await self.until(lambda: request.closed)
        return offer.tokens, ended, [msgspec.msgpack.decode(answer) for answer in wrong]


@asynccontextmanager
async def served(master: str, layout: Layout, devices: Sequence[str]) -> AsyncIterator[Server]:
    settings: dict[str, Any] = {
        "model_key": "m",
        "staging_buffer_bytes": 4 * 1024**2,
        "lookup_deadline_s": 20.0,
        "load_deadline_s": 20.0,
        "store": {"master_address": master, "segment_bytes": 32 * 1024**2},
    }
    async with anyio.create_task_group() as group:
        processes = []
        for number, device in enumerate(devices):
            rank = msgspec.msgpack.encode(Rank(number, settings, layout, device, PAGES)).hex()
            command = [sys.executable, str(Path(__file__).with_name("rank_process.py")), rank]
            processes.append(await anyio.open_process(command, stderr=None))
        try:
            ranks = Ranks(processes)
            with anyio.fail_after(60):
                hellos = await ranks.hello()
            async with open_scheduler(settings, hellos) as kv:
                yield Server(kv, ranks, layout)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(30):
                for process in processes:
                    assert process.stdin is not None
                    await process.stdin.aclose()
                for process in processes:
                    await process.wait()
            group.cancel_scope.cancel()
    assert [process.returncode for process in processes] == [0] * len(processes)


@pytest.mark.parametrize("devices", DEVICES)
async def test_K3_what_ranks_stored_another_server_s_ranks_load_byte_for_byte(master: str, devices: list[str]) -> None:
    split = ranked_layout(tiny_layout(groups=2, bytes_per_region=4096), len(devices))
    # The second group has one KV head, which every rank holds whole and one of them stores.
    layout = msgspec.structs.replace(split, groups=(split.groups[0], msgspec.structs.replace(split.groups[1], kv_heads=1)))
    tokens = [1000 + token for token in range(BLOCKS * layout.tokens_per_block + 1)]
    async with served(master, layout, devices) as first:
        assert (await first.load("cold", tokens))[0] == 0
        await first.compute(first.kv.open_request("r", tokens), tokens)
        async with served(master, layout, devices) as second:
            offered, ended, wrong = await second.load("again", tokens)
    assert offered == BLOCKS * layout.tokens_per_block
    assert ended is not None
    assert ended.state is LoadState.LOADED
    assert wrong == [[]] * len(devices)
