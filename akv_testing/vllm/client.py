"""Server processes with a real vLLM, asked from here. Synchronous: what is asked happens in that order, one after the other.

Linux with the tools of every distribution: `env` gives the servers the variables that vLLM reads.
"""

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import msgspec

from akv_testing.processes import children_of, halt
from akv_testing.vllm.protocol import Birth, Command, Options, Report

#: What vLLM's own Mooncake connector reads, and akv's. Servers that are there already have read theirs.
_MOONCAKE_FILE = "mooncake.json"
_VARIABLES = (
    "HF_HUB_OFFLINE=1",
    "VLLM_NO_USAGE_STATS=1",
    # As vLLM's workers have it on two cores; threads that wait for each other would make times of what else the machine does.
    "OMP_NUM_THREADS=1",
    # Of several ranks each is bound to a core of its own.
    "VLLM_CPU_OMP_THREADS_BIND=0|1",
    "VLLM_HOST_IP=127.0.0.1",
    # Nothing is compiled: that needs a compiler, and takes seconds in each process.
    "TORCHDYNAMO_DISABLE=1",
)
#: Seconds that a server may take to be there, the import of vLLM included, and to answer.
BIRTH_DEADLINE_S = 240.0
ANSWER_DEADLINE_S = 120.0
_LAST_WORDS = 4000


class ServerFailed(Exception):
    """A server ended, did not answer, or could not do what it was asked. The text ends with what it logged last."""


class Server:
    """One server process. Made by `Nursery.server()`."""

    def __init__(self, connection: Connection, pid: int, log: Path) -> None:
        self._connection = connection
        self._log = log
        self.pid = pid

    def ask(self, command: Command, *, deadline_s: float = ANSWER_DEADLINE_S) -> Report:
        """Have a command carried out. Raises ServerFailed."""
        self._connection.send_bytes(msgspec.json.encode(command))
        return self.answer(command, deadline_s)

    def answer(self, command: object, deadline_s: float) -> Report:
        """Wait for what the server has to say."""
        try:
            if not self._connection.poll(deadline_s):
                raise ServerFailed(f"no answer to {type(command).__name__} within {deadline_s:g} s. {self.last_words()}")
            report = msgspec.json.decode(self._connection.recv_bytes(), type=Report)
        except (EOFError, ConnectionError) as error:
            raise ServerFailed(f"the server ended during {type(command).__name__}. {self.last_words()}") from error
        if report.error:
            raise ServerFailed(f"{type(command).__name__} failed: {report.error}\n{self.last_words()}")
        return report

    def last_words(self) -> str:
        """The end of what it logged."""
        return f"Its log ends:\n{self._log.read_text(errors='replace')[-_LAST_WORDS:]}"

    def logged(self) -> str:
        """All that it wrote."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill it. None of its threads runs any more when this returns."""
        halt(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Have it end, and wait until it has. It gets some seconds for that, as a server that is stopped does."""
        self._connection.close()


class Nursery:
    """A process that has imported vLLM, whose children are servers. Made by `open_nursery()`."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self._process = process
        self._numbers = itertools.count()
        self.folder = folder

    @contextmanager
    def server(self, options: Options, pool: Mapping[str, object]) -> Iterator[Server]:
        """A server for the length of the block. `pool`: what stands in the file that its connector finds the pool by.

        Raises ServerFailed if it cannot be opened.
        """
        (self.folder / _MOONCAKE_FILE).write_bytes(msgspec.json.encode(pool))
        server = self._start(options)
        try:
            yield server
        finally:
            server.close()

    def _start(self, options: Options) -> Server:
        name = f"{next(self._numbers)}-{Path(options.model).name}-{options.connector}"
        address, log = self.folder / f"{name}.socket", self.folder / f"{name}.log"
        log.touch()
        with Listener(str(address)) as listener:
            birth = Birth(address=str(address), log=str(log), options=options)
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(birth) + b"\n")
            self._process.stdin.flush()
            connection = self._accepted(listener)
        pid = msgspec.json.decode(connection.recv_bytes(), type=int)
        server = Server(connection, pid, log)
        server.answer(options, BIRTH_DEADLINE_S)
        return server

    def _accepted(self, listener: Any) -> Connection:
        listener._listener._socket.settimeout(BIRTH_DEADLINE_S)  # it offers none itself
        try:
            accepted: Connection = listener.accept()
        except TimeoutError as error:
            raise ServerFailed(f"no server after {BIRTH_DEADLINE_S:g} s. {self.last_words()}") from error
        return accepted

    def last_words(self) -> str:
        """The end of what the nursery itself wrote."""
        return f"The nursery said:\n{(self.folder / 'nursery.log').read_text(errors='replace')[-_LAST_WORDS:]}"


@contextmanager
def open_nursery(folder: Path) -> Iterator[Nursery]:
    """A nursery for the length of the block. `folder` is for what servers read and write.

    Importing vLLM goes on when this returns.
    """
    variables = [*_VARIABLES, f"MOONCAKE_CONFIG_PATH={folder / _MOONCAKE_FILE}"]
    command = ["env", *variables, sys.executable, "-m", "akv_testing.vllm.nursery"]
    with (folder / "nursery.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)  # noqa: S603 - our own program
    try:
        yield Nursery(process, folder)
    finally:
        _end(process)


def mooncake_file(address: str, segment_bytes: int) -> dict[str, object]:
    """What stands in the file of a deployment whose servers lend so many bytes each; with 0, other processes lend all."""
    return {
        "mode": "embedded" if segment_bytes else "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": segment_bytes,
        "local_buffer_size": 64 * 1024**2,
    }


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the nursery and what is left of its servers."""
    children = children_of(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in children:
        with suppress(ProcessLookupError):
            halt(pid, signal.SIGKILL)
