"""One of two holders stands still, and a batch has pages of both: nothing of it is believed, and it is computed (D3)."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import pytest

import akv
from akv.device import open_torch_device
from akv.pool import MooncakePool, ThreadRunner, open_pool
from akv.ports import Ports
from akv.ports.calls import CallKind
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState
from akv.settings import Settings, StoreSettings
from akv_testing.engine import TINY, EngineConfig, Pages, Result, open_engine
from akv_testing.processes import halt

pytestmark = [pytest.mark.anyio, pytest.mark.mooncake]

#: Chunks of one block: a request has one output, wherever it resumes.
CONFIG = EngineConfig(model=TINY, tokens_per_block=8, chunk_tokens=8, pages=100)
#: So many that both holders have some, but for one time in 8,000, and few, since the client waits for a frozen holder's pages
#: four at a time, three seconds each time.
BLOCKS = 14
PROMPT = [at % 250 for at in range(8 * BLOCKS + 3)]
#: Arguments: the master's address, bytes. It lends them until its input ends.
LENDER = "import runpy; runpy.run_module('akv.cli.bench.faults.lender', run_name='__main__')"


@pytest.fixture
def anyio_backend() -> str:
    """One loop: what is looked at are the store's answers, for which it takes its time."""
    return "asyncio"


class RecordedPool:
    """A pool, and what its gets answered."""

    def __init__(self, pool: MooncakePool) -> None:
        self._pool = pool
        self.probe, self.put, self.remove, self.close = pool.probe, pool.put, pool.remove, pool.close
        self.register, self.unregister, self.remove_all = pool.register, pool.unregister, pool.remove_all
        self.describe = pool.describe
        self.lets_go_at_return = pool.lets_go_at_return
        self.gets: list[list[KeyAnswer]] = []

    def get(self, keys: Sequence[str], buffer: HostBuffer, offsets: Sequence[int], sizes: Sequence[int]) -> list[KeyAnswer]:
        self.gets.append(self._pool.get(keys, buffer, offsets, sizes))
        return self.gets[-1]


async def test_D3_L8_a_holder_frozen_inside_a_batch_fails_the_load_and_only_its_own_pages_count_as_bad(
    brief_master: str, lender: Callable[..., AbstractContextManager["subprocess.Popen[str]"]]
) -> None:
    store = StoreSettings(master_address=brief_master, segment_bytes=0)
    settings = Settings(model_key=TINY.key, store=store, staging_buffer_bytes=1 << 20, lease_s=1.0, load_deadline_s=60.0)
    pages = Pages(CONFIG)
    device = open_torch_device(pages.layout, pages.caches)
    with ExitStack() as stack:
        frozen, _ = (stack.enter_context(lender(LENDER, brief_master, str(16 << 20))) for _ in range(2))
        stack.callback(os.kill, frozen.pid, signal.SIGCONT)
        async with open_pool(settings) as mooncake:
            pool = RecordedPool(mooncake)
            runner = ThreadRunner(dict.fromkeys(CallKind, 2))
            ports = Ports(pool=pool, device=device, runner=runner)
            async with (
                akv.open_connector(settings, pages.layout, pages.caches, ports=ports) as kv,
                open_engine(CONFIG, pages=pages, kv=kv) as engine,
            ):

                async def ask(request_id: str, *, reads_pool: bool = True) -> Result:
                    return await engine.generate(
                        request_id, PROMPT, max_new_tokens=4, local_reuse=False, reads_pool=reads_pool, keep_logits=True
                    )

                cold = await ask("cold", reads_pool=False)
                await engine.settled()
                halt(frozen.pid)
                computed = await ask("frozen")
                # Of the first get. The restarted request may be offered the healthy ones again, up to the first lost page.
                states = [answer.state for answer in pool.gets[0]]
                assert set(states) == {KeyState.HOLDER_LOST, KeyState.LEASE_EXPIRED}, "pages of both, and none is good"
                assert computed.failed_loads > 0
                assert computed.from_pool_tokens <= 8 * states.index(KeyState.HOLDER_LOST)

                os.kill(frozen.pid, signal.SIGCONT)
                again = await ask("again")
        device.close()
    # At least up to the first page of the holder that stood still: the others were late because of it, and are good.
    assert again.from_pool_tokens >= 8 * states.index(KeyState.HOLDER_LOST)
    for result in (computed, again):
        assert result.tokens == cold.tokens
        assert result.logits is not None
        assert cold.logits is not None
        assert result.logits.equal(cold.logits)
