"""One serving process without a model: a connector on the fakes, and pages whose content follows from what they stand for.

    server = FakeServer(store=store)
    async with server.open() as kv:
        req = kv.open_request("r", tokens)
        table = server.allocate(tokens)
        await server.compute(kv, req, tokens, table)          # one pass: plan, forward, after_forward

The content of a page is a function of its block's hash and its layer group, as it is with a model of fixed weights, so any
page in the store or in a cache can be checked by itself.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import shake_128
from typing import Any, Self

from akv.connector import Connector, open_connector
from akv.plan.identity import Hashing
from akv.plan.integrity import trailer, trailer_bytes
from akv.plan.keys import KeySpace, shard_of
from akv.ports.calls import CallKind
from akv.request import Load, Request
from akv.settings import check_settings
from akv.units import NO_PAGE
from akv.values.capabilities import EngineCapabilities
from akv.values.layout import Layout
from akv.values.requests import Scheduled
from akv.values.scope import EMPTY_SCOPE, Scope
from akv_testing.board import FakeBoard
from akv_testing.calls import FakeRunner, Latency
from akv_testing.device import FakeDevice
from akv_testing.pool import FakePool
from akv_testing.ports import fake_ports, tiny_layout
from akv_testing.segments import FakeHost
from akv_testing.store import FakeStore

#: Slots of staging memory in each direction unless a test says otherwise: two loaders get eight each, and move four at a time.
SLOTS = 16

PageTable = list[list[int]]


class FakeServer:
    """A server process: fakes, settings, and the engine's pages.

    `store`: what several servers share; its own by default. `layout`: two layer groups by default. `pages`: pages per group.
    `slots`: staging slots per direction. `host_pages`: the store can reach the pages itself, and the engine keeps pages that
    are in quarantine. `segments`: what processes of its host lend. `board`: where it posts what it counted. `capabilities`:
    what the engine declares otherwise. `rank`: whose pages these are, of a layout of several ranks (`RankedServer`).
    `settings`: fields of `akv.Settings` that a test is about.
    """

    def __init__(
        self,
        *,
        store: FakeStore | None = None,
        layout: Layout | None = None,
        pages: int = 64,
        slots: int = SLOTS,
        latency: Latency | None = None,
        name: str = "server",
        host_pages: bool = False,
        segments: FakeHost | None = None,
        board: FakeBoard | None = None,
        capabilities: EngineCapabilities | None = None,
        rank: int = 0,
        **settings: Any,
    ) -> None:
        self.layout = tiny_layout(groups=2) if layout is None else layout
        self.ports = fake_ports(
            self.layout,
            pages=pages,
            store=store,
            latency=latency,
            name=name,
            host_pages=host_pages,
            segments=segments,
            board=board,
        )
        self.capabilities = EngineCapabilities(keeps_quarantined_pages=host_pages) if capabilities is None else capabilities
        self.settings: dict[str, Any] = {
            "model_key": "m",
            "pool": "embedded",
            "staging_buffer_bytes": slots * (self.layout.largest_page_bytes + trailer_bytes(settings.get("integrity", "off"))),
            **settings,
        }
        checked = check_settings(self.settings)
        self.keys = KeySpace.of_settings(checked, self.layout, rank=rank)
        #: By group, what tells this rank's part of a page from others', whose heads are others.
        self._parts = [shard_of(self.layout, group, rank).name.encode() for group in range(len(self.layout.groups))]
        ahead, secret = self.capabilities.lookahead, checked.key_secret.encode()
        self._hashing = Hashing(self.layout.tokens_per_block, ahead, checked.key_format, secret)
        self._free = [list(range(pages)) for _ in self.layout.groups]
        #: Names the weights that compute. Other weights write other bytes.
        self.weights = b""

    @classmethod
    def warm(cls, *stored: Sequence[int], **arguments: Any) -> Self:
        """A server whose store holds the whole blocks of these sequences already. `arguments`: the constructor's."""
        server = cls(**arguments)
        for tokens in stored:
            server.put_in_store(tokens)
        return server

    @property
    def store(self) -> FakeStore:
        """The store behind the pool."""
        return self.ports.pool.store

    @property
    def pool(self) -> FakePool:
        """Its client of the store."""
        return self.ports.pool

    @property
    def device(self) -> FakeDevice:
        """Its device."""
        return self.ports.device

    @property
    def runner(self) -> FakeRunner:
        """What runs its calls."""
        return self.ports.runner

    @property
    def tokens_per_block(self) -> int:
        """T."""
        return self.layout.tokens_per_block

    def open(self, **settings: Any) -> AbstractAsyncContextManager[Connector]:
        """A connector on the fakes, with `settings` on top of the server's own."""
        return open_connector(self.settings | settings, self.layout, capabilities=self.capabilities, ports=self.ports)

    # -- pages

    def allocate(self, tokens: Sequence[int] | int) -> PageTable:
        """A page table, with free pages, for all blocks of a sequence, or for a number of blocks."""
        blocks = tokens if isinstance(tokens, int) else -(-len(tokens) // self.tokens_per_block)
        return [[free.pop(0) for _ in range(blocks)] for free in self._free]

    def free(self, table: PageTable) -> None:
        """The engine's own release of pages; poisons them, so that whoever still reads them reads nonsense, or races."""
        writes = [(g, page, 0xAA) for g, pages in enumerate(table) for page in pages if page != NO_PAGE]
        self.device.kernel(writes=writes)
        for group, pages in enumerate(table):
            self._free[group].extend(page for page in pages if page != NO_PAGE)

    @property
    def free_pages(self) -> list[int]:
        """Free pages of each group."""
        return [len(free) for free in self._free]

    def hashes(self, tokens: Sequence[int], scope: Scope = EMPTY_SCOPE) -> list[bytes]:
        """The hashes of the whole blocks of a sequence, as far as their lookahead is there."""
        chain = self._hashing.chain(scope, tokens)
        return chain.hashes(0, chain.hashable_blocks)

    def content(self, block_hash: bytes, group: int) -> bytes:
        """What a page of this block holds."""
        part = self._parts[group] if self.layout.world > 1 else b""
        return page_content(block_hash + self.weights + part, group, self.layout.groups[group].bytes_per_page)

    def value(self, key: str, group: int) -> bytes:
        """What the store holds under a key of this server: the page, and what is behind it."""
        page = self.content(bytes.fromhex(key.rpartition("/")[2]), group)
        settings = check_settings(self.settings)
        secret = settings.integrity_secret.encode()
        return page if settings.integrity == "off" else page + trailer(key, page, secret)

    def write(
        self,
        tokens: Sequence[int],
        table: PageTable,
        first: int = 0,
        end: int | None = None,
        duration_s: float = 0.0,
        scope: Scope = EMPTY_SCOPE,
    ) -> None:
        """The forward pass over whole blocks [first, end): a kernel that reads the blocks before and writes these."""
        hashes = self.hashes(tokens, scope)[:end]
        groups = range(len(self.layout.groups))
        self.device.kernel(
            reads=[(g, table[g][b]) for b in range(first) for g in groups],
            writes=[(g, table[g][b], self.content(hashes[b], g)) for b in range(first, len(hashes)) for g in groups],
            duration_s=duration_s,
        )

    def wrong_pages(self, tokens: Sequence[int], table: PageTable, first: int, end: int) -> list[tuple[int, int]]:
        """Blocks of [first, end), each with its group, whose page does not hold what it stands for."""
        hashes = self.hashes(tokens)
        return [
            (group, block)
            for group in range(len(self.layout.groups))
            for block in range(first, end)
            if self.device.read_page(group, table[group][block]) != self.content(hashes[block], group)
        ]

    # -- loads and passes

    async def load(
        self, kv: Connector, request_id: str, tokens: Sequence[int], local_tokens: int = 0
    ) -> tuple[Request, Load, PageTable]:
        """Open a request, look it up, take up the whole offer, and return while its pages load."""
        request = kv.open_request(request_id, tokens)
        offer = await request.lookup(local_tokens)
        table = self.allocate(tokens)
        return request, request.reserve(offer, offer.tokens, table), table

    async def compute(
        self,
        kv: Connector,
        request: Request,
        tokens: Sequence[int],
        table: PageTable,
        before: int = 0,
        *,
        duration_s: float = 0.0,
        scope: Scope = EMPTY_SCOPE,
    ) -> None:
        """One pass over all of `tokens` behind the first `before`."""
        part = Scheduled(request=request, computed_before=before, tokens=len(tokens) - before, pages=table)
        plan = kv.plan_pass([part])
        self.write(tokens, table, before // self.tokens_per_block, duration_s=duration_s, scope=scope)
        await kv.after_forward(plan)

    # -- the store

    def keys_of(self, tokens: Sequence[int], scope: Scope = EMPTY_SCOPE) -> list[list[str]]:
        """For each layer group the keys of a sequence's whole blocks."""
        hashes = self.hashes(tokens, scope)
        return [self.keys.keys(group, hashes) for group in range(len(self.layout.groups))]

    def stored_blocks(self, tokens: Sequence[int], scope: Scope = EMPTY_SCOPE) -> list[int]:
        """Blocks of a sequence whose pages of every group are in the store."""
        there = set(self.store.keys())
        return [block for block, keys in enumerate(zip(*self.keys_of(tokens, scope), strict=True)) if there.issuperset(keys)]

    def put_in_store(self, tokens: Sequence[int], blocks: Sequence[int] | None = None) -> None:
        """Store a sequence's blocks (default: all whole ones) as if another server had computed them."""
        hashes = self.hashes(tokens)
        for block in range(len(hashes)) if blocks is None else blocks:
            for group in range(len(self.layout.groups)):
                key = self.keys.keys(group, [hashes[block]])[0]
                self.store.write(key, self.value(key, group))

    def wrong_values(self) -> list[str]:
        """Keys of this server's space whose value is not what the key stands for."""
        present = self.store.keys()
        right = {
            key
            for group in range(len(self.layout.groups))
            for key in present
            if key.startswith(self.keys.prefix(group)) and self.store.value(key) == self.value(key, group)
        }
        return [key for key in present if key not in right]

    def left_behind(self) -> list[str]:
        """What leaving the connector's block has not given back: buffers, calls, copies. Empty after a clean end."""
        left = [f"registered {buffer!r}" for buffer in self.pool.registered]
        left += [f"outstanding {kind} calls" for kind in CallKind if self.runner.outstanding(kind)]
        return [*left, "copies"] if self.device.busy else left


def page_content(block_hash: bytes, group: int, nbytes: int) -> bytes:
    """What the page of a block holds in a layer group, in place of what a model would compute: it follows from these alone."""
    return shake_128(block_hash + bytes([group])).digest(nbytes)
