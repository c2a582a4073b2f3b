"""Several servers that save the same prompt at the same time, each through a client of its own, and a real store (S5)."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any

import anyio
import pytest
from torch import Tensor

import akv
from akv.device import open_torch_device
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.pool import MooncakePool, ThreadRunner, set_up_store
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.settings import StoreSettings
from akv.values.scope import Scope
from akv_testing.engine import TINY, TINY_SLIDING, EngineConfig, ModelConfig, Pages

pytestmark = [pytest.mark.anyio, pytest.mark.mooncake]

LIMITS = {CallKind.PROBE: 2, CallKind.GET: 1, CallKind.PUT: 1, CallKind.COPY: 2, CallKind.SNAPSHOT: 1}
MODEL_KEY = "many-writers"
BLOCKS = 60
WRITERS = 6


class Server:
    """One engine's pages, every byte of them the same, and a connector."""

    def __init__(self, pool: MooncakePool, fill: float, model: ModelConfig = TINY) -> None:
        self.pages = Pages(EngineConfig(model=model, tokens_per_block=8, pages=BLOCKS + 1))
        self.fill = fill
        self.tensors: list[Tensor] = [region for group in self.pages.caches for region in group]
        for tensor in self.tensors:
            tensor.fill_(fill)
        self._pool = pool

    @asynccontextmanager
    async def open(self) -> AsyncIterator[akv.Connector]:
        device = open_torch_device(self.pages.layout, self.pages.caches)
        ports = Ports(pool=self._pool, device=device, runner=ThreadRunner(LIMITS))
        settings = {"model_key": MODEL_KEY, "pool": "embedded", "staging_buffer_bytes": "1MiB", "save_backoff_s": 60}
        async with akv.open_connector(settings, self.pages.layout, self.pages.caches, ports=ports) as kv:
            yield kv
        device.close()

    @property
    def table(self) -> list[list[int]]:
        return [list(range(BLOCKS + 1)) for _ in self.pages.layout.groups]

    async def save(self, kv: akv.Connector, tokens: range, scope: Scope) -> akv.SavesCompleted:
        request = kv.open_request("r", tokens, scope)
        plan = kv.plan_pass([akv.Scheduled(request=request, computed_before=0, tokens=len(tokens), pages=self.table)])
        await kv.after_forward(plan)
        request.finish()
        while True:
            await kv.changed.wait()
            for done in kv.completed():
                if isinstance(done, akv.SavesCompleted):
                    return done


@pytest.fixture(scope="module")
def clients(pool: MooncakePool, master: str) -> Iterator[list[MooncakePool]]:
    """Three clients of one pool, of which one lends memory."""
    with ExitStack() as stack:
        store = StoreSettings(master_address=master, segment_bytes=0)
        yield [pool, *(stack.enter_context(closing(set_up_store(store))) for _ in range(2))]


async def test_S5_of_many_servers_that_save_one_prompt_at_once_each_hears_that_it_is_stored_and_one_wins_whole(
    clients: list[MooncakePool], new_key: Callable[[], str]
) -> None:
    tokens, scope = range(8 * BLOCKS + 3), Scope(salt=new_key())
    servers = [Server(clients[number % len(clients)], fill=number + 1.0) for number in range(WRITERS)]
    ends: list[akv.SavesCompleted] = []

    async def one(server: Server) -> None:
        async with server.open() as kv:
            arrived[server.fill].set()
            for other in arrived.values():
                await other.wait()
            ends.append(await server.save(kv, tokens, scope))

    arrived = {server.fill: anyio.Event() for server in servers}
    async with anyio.create_task_group() as group:
        for server in servers:
            group.start_soon(one, server)
    assert [(end.stored_blocks, end.refused_blocks) for end in ends] == [(BLOCKS, 0)] * WRITERS

    reader = Server(clients[0], fill=0.0)
    async with reader.open() as kv, kv.request("reader", tokens, scope) as request:
        offer = await request.lookup()
        assert offer.tokens == 8 * BLOCKS
        await request.reserve(offer, offer.tokens, reader.table).wait()
    for group_tensors in reader.pages.caches:
        for page in range(BLOCKS):
            values = {value for tensor in group_tensors for value in tensor[page].flatten().tolist()}
            assert len(values) == 1, "a page of two writers"
            assert values <= {server.fill for server in servers}


async def test_S5_a_window_page_that_another_client_is_still_writing_is_not_believed(
    pool: MooncakePool,
    begin_write: Callable[[str], None],
    new_key: Callable[[], str],
    events: Callable[..., list[dict[str, Any]]],
) -> None:
    """The put of it answers 0; the probe behind the puts tells."""
    tokens, scope = range(8 * BLOCKS + 3), Scope(salt=new_key())
    server = Server(pool, fill=1.0, model=TINY_SLIDING)
    layout = server.pages.layout
    chain = Chain(scope_seed(scope), layout.tokens_per_block)
    chain.append(tokens)
    window = next(number for number, group in enumerate(layout.groups) if group.is_window)
    begin_write(KeySpace.of(layout, "akv1", MODEL_KEY).keys(window, chain.hashes(BLOCKS - 1, BLOCKS))[0])
    async with server.open() as kv:
        assert await server.save(kv, tokens, scope) == akv.SavesCompleted(
            request_id="r", incarnation=1, stored_blocks=BLOCKS, refused_blocks=0
        )
    assert [(event["blocks"], event["reason"]) for event in events("akv.save.refused")] == [(1, "missing")]
