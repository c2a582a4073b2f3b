"""Real vLLM servers that share one real pool: of each model a first one, and a second one with few blocks."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random

import pytest

from akv_testing.master import running_master
from akv_testing.vllm.client import Nursery, Server, mooncake_file, open_nursery
from akv_testing.vllm.models import GEMMA3, LLAMA, VOCABULARY, write_model
from akv_testing.vllm.protocol import AKV, Options

TOKENS_PER_BLOCK = 32
SEGMENT_BYTES = 256 * 1024**2
#: By model, blocks of the second server: enough for one long request, too few for two that go on.
FEW_BLOCKS = {LLAMA: 123, GEMMA3: 130}
#: Beside other work a lookup may take longer than a server would wait; what is measured here is not time.
PATIENT = {"lookup_deadline_s": 20.0, "load_deadline_s": 30.0}


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with open_nursery(tmp_path_factory.mktemp("vllm")) as opened:
        yield opened


@pytest.fixture(scope="session")
def open_server(nursery: Nursery) -> Iterator[Callable[..., Server]]:
    """Start a server that stays until the last test: `open_server(model, address, segment_bytes=..., **settings)`."""
    with ExitStack() as stack:

        def opened(
            model: str, address: str, *, segment_bytes: int = SEGMENT_BYTES, blocks: int = 256, **settings: object
        ) -> Server:
            extra = {"model_key": f"tiny-{model}", "staging_buffer_bytes": 64 * 1024**2} | settings
            options = Options(model=str(write_model(model, nursery.folder)), connector=AKV, blocks=blocks, extra=extra)
            return stack.enter_context(nursery.server(options, mooncake_file(address, segment_bytes)))

        yield opened


@pytest.fixture(scope="session")
def master() -> Iterator[str]:
    """The address of a healthy master, "host:port"."""
    with running_master() as (address, _):
        yield address


@pytest.fixture(scope="session", params=[LLAMA, GEMMA3])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def first(model: str, master: str, open_server: Callable[..., Server]) -> Server:
    return open_server(model, master, **PATIENT)


@pytest.fixture(scope="session")
def second(model: str, master: str, open_server: Callable[..., Server]) -> Server:
    return open_server(model, master, blocks=FEW_BLOCKS[model], **PATIENT)


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
