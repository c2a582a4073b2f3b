"""What the tests of the demo's two modes share: the fault that they plant between its processes."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from akv.cli.demo.setting import settings
from akv.plan.hashing import Chain, scope_seed
from akv.plan.keys import KeySpace
from akv.values.scope import EMPTY_SCOPE
from akv_testing.engine import EngineConfig, layout_of


@pytest.fixture
def swap_two_stored_pages() -> Callable[..., Awaitable[None]]:
    """Give two neighbouring pages of a prompt, its third and fourth say, each other's bytes, as no client ever would."""

    async def swap(
        address: str, config: EngineConfig, prompt: tuple[int, ...], *, group: int = 0, first_block: int = 2
    ) -> None:
        await anyio.to_thread.run_sync(_swap, address, config, prompt, group, first_block)

    return swap


def _swap(address: str, config: EngineConfig, prompt: tuple[int, ...], group: int, first: int) -> None:
    from mooncake.store import MooncakeDistributedStore

    lookahead = config.model.lookahead
    chain = Chain(scope_seed(EMPTY_SCOPE, lookahead=lookahead), config.tokens_per_block, lookahead=lookahead)
    chain.append(prompt)
    space = KeySpace.of(layout_of(config), settings(address, config.model.key).namespace, config.model.key)
    keys = space.keys(group, chain.hashes(first, first + 2))
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * 1024**2, "tcp", "", address) == 0
    pages = [store.get(key) for key in keys]
    assert pages[0] != pages[1] != b"" != pages[0]
    assert [store.remove(key, True) for key in keys] == [0, 0]
    assert [store.put(key, page) for key, page in zip(keys, reversed(pages), strict=True)] == [0, 0]
    assert store.close() == 0
