"""Thousands of requests at random on any connector, many at a time, preempted, ended and cancelled wherever they stand.

    soak = Soak(layout, pages, page_count=2048, seed=0, moment_s=0.02)
    await soak.run(kv, 10_000, at_a_time=16)
    assert soak.wrong == [] and soak.free_pages == [2048] * len(layout.groups)

The content of a page follows from its block's hash and its layer group, so each page of a load that ended as LOADED is checked
by itself. A free page holds poison: whatever writes into pages after the engine got them back is found when these are handed
out again, and whatever still reads them stores bytes that the next load of that block finds wrong.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, Protocol

from anyio import CancelScope, create_task_group, get_cancelled_exc_class, move_on_after, sleep

from akv.connector import Connector
from akv.errors import EngineContractError, LoadCancelled, LoadFailed
from akv.plan.hashing import Chain, scope_seed
from akv.request import Request
from akv.values.layout import Layout
from akv.values.messages import PagesPerGroup, PagesReleased
from akv.values.requests import Scheduled
from akv.values.scope import EMPTY_SCOPE
from akv_testing.server import page_content

#: What a free page holds.
POISON = 0xAA
#: Prompts begin with one of so many texts; of each so many blocks at most are shared, and so many are a prompt's own.
FAMILIES, SHARED_BLOCKS, OWN_BLOCKS = 48, 8, 4
#: Tokens that are generated, at most.
GENERATED_TOKENS = 6
#: Blocks of one request, at most, for a block of as many tokens or more.
MOST_BLOCKS = SHARED_BLOCKS + OWN_BLOCKS + GENERATED_TOKENS
#: How often a request is preempted: of its loads, and of its passes.
PREEMPTED = 0.04
#: Ways in which a request is ended before its time; None for one that runs to its end. "natively": asyncio's `Task.cancel()`.
WAYS = (None, None, "scope", "request", "finish", "natively")


class SoakPages(Protocol):
    """The engine's pages, written and read as its kernels do."""

    def write(self, group: int, page: int, content: bytes) -> None:
        """Overwrite a whole page."""
        ...

    def read(self, group: int, page: int) -> bytes:
        """What a page holds now."""
        ...


class Soak:
    """An engine without a model, and its clients. `moment_s`: about how long a request takes; cancellations come within it."""

    def __init__(self, layout: Layout, pages: SoakPages, page_count: int, *, seed: int, moment_s: float) -> None:
        self.layout = layout
        self.pages = pages
        self.random = Random(seed)
        self.moment_s = moment_s
        #: What became of requests, and where those that were cut short stood.
        self.seen: Counter[str] = Counter()
        self.cut_short: Counter[str] = Counter()
        #: Pages of loads that were compared, and what was found wrong: "loaded" pages, and pages "written after release".
        self.pages_compared = 0
        self.wrong: list[str] = []
        groups = range(len(layout.groups))
        self._free = [list(range(page_count)) for _ in groups]
        #: Pages in tables of requests that have not given them back, and pages that are in quarantine.
        self._in_tables: list[set[int]] = [set() for _ in groups]
        self._quarantined: list[set[int]] = [set() for _ in groups]
        self._left = 0
        self._poison = [bytes([POISON]) * group.bytes_per_page for group in layout.groups]
        for group in groups:
            for page in range(page_count):
                pages.write(group, page, self._poison[group])

    @property
    def free_pages(self) -> list[int]:
        """Free pages of each group."""
        return [len(free) for free in self._free]

    async def run(self, kv: Connector, requests: int, *, at_a_time: int) -> None:
        """Serve so many requests. Returns when each has closed; calls that were given up may still be under way."""
        self._left = requests
        async with create_task_group() as group:
            for number in range(at_a_time):
                group.start_soon(self._client, kv, f"client {number}")

    async def _client(self, kv: Connector, name: str) -> None:
        """One request after the other, all under one id."""
        while self._left > 0:
            self._left -= 1
            life = Life(self, kv, name)
            await self._ended_somehow(life, self.random.choice(WAYS), self.random.random() * self.moment_s)
            self.fetch(kv)

    async def _ended_somehow(self, life: "Life", way: str | None, after_s: float) -> None:
        if way == "natively" and in_asyncio():
            await _cancelled_natively(life.run, after_s)
        elif way in {"scope", "natively"}:
            with move_on_after(after_s):
                await life.run()
        elif way is None:
            await life.run()
        else:
            async with create_task_group() as group:
                group.start_soon(partial(life.end_beside, after_s, finishes=way == "finish"))
                await life.run()
                group.cancel_scope.cancel()

    def fetch(self, kv: Connector) -> None:
        """Poll, as a batching loop does. What is told here concerns any client."""
        for done in kv.completed():
            if not isinstance(done, PagesReleased):
                self.name(done.quarantined)
                continue
            for group, pages in enumerate(done.pages):
                self._quarantined[group].difference_update(pages)
                # A request that still has them gives them back itself.
                self._release(group, [page for page in pages if page not in self._in_tables[group]])

    def name(self, quarantined: PagesPerGroup) -> None:
        """These pages stay out of use until they are released."""
        for group, pages in enumerate(quarantined):
            self._quarantined[group].update(pages)

    def take(self, group: int) -> int:
        """A free page. Nobody may have written into it since it was given back."""
        page = self._free[group].pop()
        if self.pages.read(group, page) != self._poison[group]:
            self.wrong.append(f"page {page} of group {group} was written after its release")
        self._in_tables[group].add(page)
        return page

    def give_back(self, table: list[list[int]]) -> None:
        """A request has closed: its pages are overwritten and free, but for those in quarantine."""
        for group, pages in enumerate(table):
            self._in_tables[group].difference_update(pages)
            self._release(group, [page for page in pages if page not in self._quarantined[group]])

    def _release(self, group: int, pages: list[int]) -> None:
        for page in pages:
            self.pages.write(group, page, self._poison[group])
        # Those that were free before go first: a page lies free for a while, where a late write is seen.
        self._free[group][:0] = pages


class Life:
    """One request, from its prompt to the return of its pages."""

    def __init__(self, soak: Soak, kv: Connector, name: str) -> None:
        self._soak = soak
        self._kv = kv
        self._size = soak.layout.tokens_per_block
        random = soak.random
        family, shared = random.randrange(FAMILIES), random.randrange(SHARED_BLOCKS * self._size)
        own = (random.randrange(1 << 40) for _ in range(random.randrange(1, OWN_BLOCKS * self._size)))
        self._chain = Chain(scope_seed(EMPTY_SCOPE), self._size)
        self._tokens = [*range(1000 * family, 1000 * family + shared), *own]
        self._chain.append(self._tokens)
        self._table: list[list[int]] = [[] for _ in soak.layout.groups]
        self._request: Request = kv.open_request(name, self._tokens)
        self._stage = "looking up"
        #: Its end was asked for beside it.
        self._ended_beside = False
        self._end_named = False

    async def run(self) -> None:
        """Its whole way; its pages are given back however it ends."""
        try:
            await self._serve()
            self._soak.seen["ended"] += 1
        except get_cancelled_exc_class():
            self._cut_short()
            raise
        except LoadFailed as failed:
            self._soak.name(failed.quarantined)
            self._soak.seen["load failed"] += 1
        except LoadCancelled as cancelled:
            self._soak.name(cancelled.quarantined)
            self._cut_short()
        except EngineContractError:
            # Whoever goes on with a request that has ended is told so.
            if not self._ended_beside:
                raise
            self._cut_short()
        finally:
            await self._closed()  # noqa: ASYNC102 - shielded there
            self._soak.give_back(self._table)

    async def end_beside(self, after_s: float, *, finishes: bool) -> None:
        """End the request after a while, whatever it is doing."""
        await sleep(after_s)
        self._ended_beside = True
        if finishes:
            self._request.finish()
        else:
            self._name(await self._request.cancel())

    async def _serve(self) -> None:
        random = self._soak.random
        before = await self._resumed()
        chunk = random.choice([self._size, 3 * self._size + 1, 1000])
        while before < len(self._tokens):
            self._stage = "computing"
            end = min(len(self._tokens), before + chunk)
            await self._pass(before, end)
            before = await self._resumed_elsewhere() if random.random() < PREEMPTED else end
        for _ in range(self._soak.random.randrange(GENERATED_TOKENS)):
            token = self._soak.random.randrange(1 << 40)
            self._tokens.append(token)
            self._chain.append([token])
            self._request.append([token])
            await self._pass(len(self._tokens) - 1, len(self._tokens))
        self._stage = "ending"
        self._name(await self._request.finished())

    async def _resumed(self) -> int:
        """Look up and load; the tokens that need not be computed."""
        random = self._soak.random
        self._stage = "looking up"
        offer = await self._request.lookup()
        honoured = offer.tokens - offer.tokens % self._size
        if random.random() < 0.2:
            honoured = self._size * random.randrange(honoured // self._size + 1)
        self._grow(honoured)
        load = self._request.reserve(offer, honoured, self._table)
        self._stage = "loading"
        if random.random() < PREEMPTED:
            await sleep(random.random() * self._soak.moment_s / 4)
            return await self._resumed_elsewhere()
        await load.wait()
        self._compare(honoured // self._size)
        self._soak.seen["loaded"] += honoured > 0
        return honoured

    async def _resumed_elsewhere(self) -> int:
        """The pages are taken away, and it goes on with others."""
        self._stage = "preempted"
        self._name(await self._request.preempted())
        self._soak.give_back(self._table)
        self._table = [[] for _ in self._table]
        self._soak.seen["preempted"] += 1
        return await self._resumed()

    async def _pass(self, before: int, end: int) -> None:
        """Nothing waits between a plan and its pass: passes come in the order of their plans."""
        self._grow(end)
        scheduled = Scheduled(request=self._request, computed_before=before, tokens=end - before, pages=self._table)
        plan = self._kv.plan_pass([scheduled])
        self._write(before // self._size, end // self._size)
        await self._kv.after_forward(plan)
        # The other requests' share of the passes to come.
        await sleep(self._soak.random.random() * self._soak.moment_s / 8)

    def _grow(self, tokens: int) -> None:
        blocks = -(-tokens // self._size)
        for group, pages in enumerate(self._table):
            pages.extend(self._soak.take(group) for _ in range(blocks - len(pages)))

    def _write(self, first: int, end: int) -> None:
        for group, pages in enumerate(self._table):
            for block, content in enumerate(self._contents(group, first, end), first):
                self._soak.pages.write(group, pages[block], content)

    def _compare(self, end: int) -> None:
        for group, pages in enumerate(self._table):
            for block, content in enumerate(self._contents(group, 0, end)):
                self._soak.pages_compared += 1
                if self._soak.pages.read(group, pages[block]) != content:
                    self._soak.wrong.append(f"block {block} of group {group} was loaded wrong")

    def _contents(self, group: int, first: int, end: int) -> list[bytes]:
        nbytes = self._soak.layout.groups[group].bytes_per_page
        return [page_content(block_hash, group, nbytes) for block_hash in self._chain.hashes(first, end)]

    def _cut_short(self) -> None:
        self._soak.seen["cut short"] += 1
        self._soak.cut_short[self._stage] += 1

    async def _closed(self) -> None:
        """Cancel, whatever comes meanwhile, until nothing touches the pages any more."""
        while not self._request.closed:
            try:
                with CancelScope(shield=True):
                    self._name(await self._request.cancel())
            except get_cancelled_exc_class():  # noqa: ASYNC103 - the engine's own clean-up goes on
                continue  # noqa: ASYNC104 - as above
        self._name(self._request.quarantined)

    def _name(self, quarantined: PagesPerGroup) -> None:
        """What a wait for the request's end returned. Once it has closed each of them says the same, and the pages may have
        been released since the first.
        """
        if not self._end_named:
            self._soak.name(quarantined)
        self._end_named = self._request.closed


async def _cancelled_natively(work: Callable[[], Coroutine[Any, Any, None]], after_s: float) -> None:
    task = asyncio.ensure_future(work())
    try:
        await asyncio.wait({task}, timeout=after_s)
    finally:
        task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def in_asyncio() -> bool:
    """Whether asyncio runs this, and not trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
