"""akv's backend for SGLang on a real store: what every backend must pass, a holder that goes, and the end of a process."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from akv.bridge import LoopThread
from akv.device.host_memory import TorchBuffer
from akv.engines.sglang import HiCacheBackend
from akv.engines.sglang.page_store import StorePorts
from akv.pool import MooncakePool, ThreadRunner, open_embedded_master, set_up_store
from akv.pool.exit_guard import PROCESS_GUARD
from akv.settings import StoreSettings
from akv_testing.conformance.sglang import HiCacheConformance
from akv_testing.engines.sglang import HiCacheStorageConfig
from akv_testing.engines.sglang.on_fakes import BACKEND

pytestmark = pytest.mark.mooncake

_MODELS = itertools.count()


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of a master."""
    loop = LoopThread(lambda: open_embedded_master(5.0), name="akv-test-master")
    yield loop.served
    assert loop.close(10.0)


@pytest.fixture(scope="module")
def pool(master: str) -> Iterator[MooncakePool]:
    """A client of it that lends 64 MiB."""
    made = set_up_store(StoreSettings(master_address=master, segment_bytes=64 << 20))
    PROCESS_GUARD.hold(made)
    yield made
    made.close()
    PROCESS_GUARD.release(made)


@pytest.fixture
def make_backend(pool: MooncakePool, master: str) -> Iterator[Callable[[HiCacheStorageConfig], HiCacheBackend]]:
    """Backends that share one client, and nothing with those of other tests."""
    model, made = f"model-{next(_MODELS)}", list[HiCacheBackend]()

    def make(config: HiCacheStorageConfig) -> HiCacheBackend:
        settings = {"model_key": model, "store": {"master_address": master}}
        config.extra_config = {**(config.extra_config or {}), "akv": settings}
        ports = StorePorts(pool=pool, runner=ThreadRunner({}), memory=partial(TorchBuffer, pinned=False))
        made.append(BACKEND(config, {}, ports=ports))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


class TestAkvBackendOnMooncake(HiCacheConformance):
    """Through the client's threads, into a real segment and back."""


SERVER = """
import sys, time
from akv_testing.conformance.sglang import prompt, written_by
from akv_testing.engines.sglang import HiCache, HiCacheStorageConfig, HostPool
from akv_testing.engines.sglang.on_fakes import BACKEND
from akv_testing.engines.sglang.rank import Rank

address, work = sys.argv[1:]
settings = {"model_key": "m", "store": {"master_address": address, "segment_bytes": "16MiB" if work == "write" else 0}}
config = HiCacheStorageConfig(extra_config={"interface_v1": 1, "akv": settings})
cache = HiCache([Rank(config, BACKEND, HostPool())])
if work == "write":
    written_by(cache, prompt(6))
    print("written", flush=True)
    sys.stdin.read()
for line in sys.stdin:
    began = time.monotonic()
    print("found", cache.prefetch(prompt(6)).wait(), "late" if time.monotonic() - began > 8.0 else "in time", flush=True)
    cache.evict(prompt(6))
    cache.check()
"""


@contextmanager
def running(address: str, work: str) -> Iterator[Callable[..., str]]:
    """A server in a process of its own; what it answers to a line."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVER, address, work], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines, answers = process.stdin, process.stdout

        def ask(line: str = "") -> str:
            if line == "kill":
                process.kill()
                return str(process.wait())
            if line == "end":
                lines.close()
                return str(process.wait(60))
            if line:
                print(line, file=lines, flush=True)
            return answers.readline().strip()

        yield ask


def test_O6_O7_one_process_reads_what_another_lends_goes_on_when_that_is_killed_and_ends_by_itself() -> None:
    loop = LoopThread(lambda: open_embedded_master(5.0), name="akv-test-own-master")
    with running(loop.served, "write") as writer, running(loop.served, "read") as reader:
        assert writer() == "written"
        assert reader("prefetch") == "found 6 in time"
        assert writer("kill") == "-9"
        assert reader("prefetch") == "found 0 in time"
        assert reader("prefetch") == "found 0 in time"
        # It never closed its backend, as an engine may forget to.
        assert reader("end") == "0"
    assert loop.close(10.0)
