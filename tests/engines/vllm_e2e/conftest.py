"""Real vLLM servers that share one real pool: of each model a first one, and a second one with few blocks."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from akv_testing.master import running_master
from akv_testing.vllm.client import Nursery, Server, mooncake_file, open_nursery
from akv_testing.vllm.models import GEMMA3, LLAMA, VOCABULARY, write_model
from akv_testing.vllm.protocol import AKV, Options

TOKENS_PER_BLOCK = 32
SEGMENT_BYTES = 256 * 1024**2
#: By model, blocks of the second server: enough for one long request, too few for two that go on.
FEW_BLOCKS = {LLAMA: 123, GEMMA3: 130}
#: As a server is started unless a test says otherwise: asynchronous scheduling is vLLM's default on a GPU.
STARTED = Options(model="", connector=AKV, blocks=256, ahead=True)
#: Beside other work a lookup may take longer than a server would wait; what is measured here is not time.
PATIENT = {"lookup_deadline_s": 20.0, "load_deadline_s": 30.0}


class Way(NamedTuple):
    """How vLLM runs a model."""

    #: Whether it schedules asynchronously: its default on a GPU.
    ahead: bool
    #: Tensor-parallel ranks, each in a process of its own; 0: one, in the scheduler's.
    ranks: int = 0

    @property
    def options(self) -> Options:
        """Of a server that runs it so."""
        return Options(model="", connector=AKV, blocks=256, ahead=self.ahead, ranks=self.ranks)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with open_nursery(tmp_path_factory.mktemp("vllm")) as opened:
        yield opened


@pytest.fixture(scope="session")
def serve(nursery: Nursery) -> Callable[..., AbstractContextManager[Server]]:
    """A server for the length of a block: `serve(model, address, segment_bytes=..., **settings)`, else as `like` says."""

    def one(
        model: str, address: str, *, segment_bytes: int = SEGMENT_BYTES, like: Options = STARTED, **settings: object
    ) -> AbstractContextManager[Server]:
        extra = {"model_key": f"tiny-{model}", "staging_buffer_bytes": 64 * 1024**2} | settings
        options = msgspec.structs.replace(like, model=str(write_model(model, nursery.folder)), extra=extra)
        return nursery.server(options, mooncake_file(address, segment_bytes))

    return one


@pytest.fixture(scope="session")
def open_server(serve: Callable[..., AbstractContextManager[Server]]) -> Iterator[Callable[..., Server]]:
    """As `serve`, of servers that stay until the last test."""
    with ExitStack() as stack:
        yield lambda *arguments, **settings: stack.enter_context(serve(*arguments, **settings))


@pytest.fixture(scope="session")
def master() -> Iterator[str]:
    """The address of a healthy master, "host:port"."""
    with running_master() as (address, _):
        yield address


@pytest.fixture(scope="session", params=[LLAMA, GEMMA3])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    scope="session",
    params=[Way(ahead=True), Way(ahead=False), Way(ahead=True, ranks=2)],
    ids=["ahead", "in step", "two ranks"],
)
def way(request: pytest.FixtureRequest) -> Way:
    way: Way = request.param
    return way


@pytest.fixture(scope="session")
def few_blocks(model: str) -> int:
    return FEW_BLOCKS[model]


@pytest.fixture(scope="session")
def first(model: str, way: Way, master: str, open_server: Callable[..., Server]) -> Server:
    return open_server(model, master, like=way.options, **PATIENT)


@pytest.fixture(scope="session")
def second(model: str, way: Way, few_blocks: int, master: str, open_server: Callable[..., Server]) -> Server:
    return open_server(model, master, like=msgspec.structs.replace(way.options, blocks=few_blocks), **PATIENT)


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """Prompts of the test's own, by name."""

    def made(name: str = "", tokens: int = 1921) -> list[int]:
        random = Random(f"{request.node.name} {name}")
        return [random.randrange(VOCABULARY) for _ in range(tokens)]

    return made


@pytest.fixture
def lender() -> Iterator[Callable[[str], "subprocess.Popen[bytes]"]]:
    """A process that lends the pool memory: `lender(address)`."""
    with ExitStack() as stack:

        def lend(address: str) -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-m", "akv.cli.bench.faults.lender", address, str(SEGMENT_BYTES)]
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL))
            assert process.stdout is not None
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            assert process.stdout.readline() == b"lent\n"
            return process

        yield lend
