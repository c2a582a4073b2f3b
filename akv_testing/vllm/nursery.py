"""`python -m akv_testing.vllm.nursery`: imports vLLM once, and forks a server for each line of its input.

Importing takes most of the time that a server needs to be there. Nothing but the import happens before the forks: the process
has one thread, and has computed nothing. Its end, or that of whoever asks a server, ends the server.
"""

import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import TypeAlias

import msgspec
import vllm.model_executor.models.gemma3
import vllm.model_executor.models.llama
import vllm.v1.worker.cpu_worker
from vllm import ModelRegistry

from akv_testing.vllm.engine import Engine
from akv_testing.vllm.faults import FailingGets
from akv_testing.vllm.protocol import Abort, Birth, FailGets, Generate, Leave, Report, Reset, Settle
from akv_testing.vllm.service import Service

#: What a server understands.
AnyCommand: TypeAlias = Generate | Abort | Leave | Settle | Reset | FailGets


def main() -> None:
    """Fork until the input ends."""
    # Known by their classes, else vLLM looks at them in a process of its own, which imports everything once more.
    ModelRegistry.register_model("LlamaForCausalLM", vllm.model_executor.models.llama.LlamaForCausalLM)
    ModelRegistry.register_model("Gemma3ForCausalLM", vllm.model_executor.models.gemma3.Gemma3ForCausalLM)
    for line in sys.stdin.buffer:
        birth = msgspec.json.decode(line, type=Birth)
        if os.fork() == 0:
            _serve(birth)
        _bury()


def _bury() -> None:
    """Reap the servers that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # none is left
        return


def _serve(birth: Birth) -> None:
    """Answer commands until nobody is there to give any. Never returns."""
    log = os.open(birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    with Client(birth.address) as connection:
        connection.send_bytes(msgspec.json.encode(os.getpid()))
        gets = FailingGets()
        engine: Engine | Service | None = None
        try:
            engine = Service(birth.options) if birth.options.apart else Engine(birth.options)
            connection.send_bytes(msgspec.json.encode(Report()))
            while True:
                command = msgspec.json.decode(connection.recv_bytes(), type=AnyCommand)
                connection.send_bytes(msgspec.json.encode(_answer(engine, gets, command)))
        except EOFError:
            pass
        except BaseException:
            connection.send_bytes(msgspec.json.encode(Report(error=traceback.format_exc())))
            raise
        finally:
            if engine is not None:
                engine.close()
    sys.exit()


def _answer(engine: Engine | Service, gets: FailingGets, command: AnyCommand) -> Report:
    match command:
        case Generate():
            report = engine.generate(command)
        case Abort() if isinstance(engine, Engine):
            report = engine.abort(command)
        case Leave() if isinstance(engine, Service):
            report = engine.leave(command)
        case Settle():
            report = engine.settle(command)
        case Reset():
            report = engine.reset(command)
        case FailGets():
            gets.fail(fail=command.fail, rank=command.rank)
            report = Report()
        case _:
            raise TypeError(f"{type(engine).__name__} knows no {type(command).__name__}")
    return msgspec.structs.replace(report, failed_gets=gets.failed)


if __name__ == "__main__":
    main()
