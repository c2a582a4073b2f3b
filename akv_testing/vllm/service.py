"""vLLM as `vllm serve` runs it: the engine's core in a process of its own, asked by coroutines. Imported by servers alone.

asyncio, because vLLM's own front is.
"""

import asyncio
import multiprocessing
import time
from typing import Any

import vllm.v1.engine.utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

from akv_testing.vllm.answers import Answers
from akv_testing.vllm.engine import STUCK_S, config_of, sampling
from akv_testing.vllm.protocol import Answer, Generate, Leave, Options, Report, Reset, Settle


class _Stats:
    """What vLLM hands its statistics to."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def record(self, scheduler_stats: Any, *args: object, **kwargs: object) -> None:
        self._answers.see_stats(scheduler_stats)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Service:
    """One server."""

    def __init__(self, options: Options) -> None:
        config = config_of(options)
        fork: Any = multiprocessing.get_context("fork")
        # A core that is spawned imports vLLM once more, and knows nothing of our weights.
        vllm.v1.engine.utils.get_mp_context = lambda: fork
        EngineCore.akv_state = _state
        self._answers = Answers()
        self._numbers = 0
        self._runner = asyncio.Runner()
        self._llm: Any = self._open(config)

    def _open(self, config: Any) -> Any:
        llm: Any = AsyncLLM.from_vllm_config(config, stat_loggers=[lambda *_: _Stats(self._answers)])
        process = llm.output_processor.process_outputs

        def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._answers.see(outputs)
            return process(outputs, *args, **kwargs)

        llm.output_processor.process_outputs = watched
        return llm

    def generate(self, command: Generate) -> Report:
        """Answer prompts, each to a client of its own."""
        began = time.perf_counter()
        answers = self._runner.run(self._answer_all(command))
        return self._report(seconds=time.perf_counter() - began, answers=answers)

    def leave(self, command: Leave) -> Report:
        """Begin to answer prompts whose clients go away."""
        self._runner.run(self._leave_all(command))
        return self._report()

    def settle(self, command: Settle) -> Report:
        """Wait until the core has nothing left to do, as it finds out by itself."""
        began = time.perf_counter()
        while self._state()[0]:
            self._runner.run(asyncio.sleep(0.005))
            if time.perf_counter() > began + command.deadline_s:
                raise TimeoutError(f"the scheduler still has requests after {command.deadline_s:g} s")
        return self._report(seconds=time.perf_counter() - began)

    def reset(self, command: Reset) -> Report:
        """Forget the local cache, as an operator may ask a server."""
        return self._report(done=self._runner.run(self._llm.reset_prefix_cache(reset_connector=command.connector)))

    def close(self) -> None:
        """End as a server that is told to end does."""
        self._llm.shutdown()
        self._runner.close()

    async def _answer_all(self, command: Generate) -> list[Answer]:
        async with asyncio.timeout(STUCK_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stream(prompt, command.tokens)) for prompt in command.prompts]
        return [self._answers.of(task.result()) for task in tasks]

    async def _leave_all(self, command: Leave) -> None:
        count = len(command.prompts)
        tasks = [asyncio.create_task(self._stream(prompt, command.tokens)) for prompt in command.prompts]
        for task in tasks:
            await asyncio.sleep(command.within_s / count)
            task.cancel()
        await asyncio.wait(tasks)

    async def _stream(self, prompt: list[int], tokens: int) -> Any:
        self._numbers += 1
        output = None
        async for part in self._llm.generate({"prompt_token_ids": prompt}, sampling(tokens), str(self._numbers)):
            assert output is None or part.outputs[0].token_ids[: len(output)] == output, "what was streamed is taken back"
            output = list(part.outputs[0].token_ids)
            last = part
        return last

    def _state(self) -> tuple[bool, int]:
        asked = self._llm.engine_core.call_utility_async("akv_state")
        busy, free_blocks = self._runner.run(asyncio.wait_for(asked, STUCK_S))
        return busy, free_blocks

    def _report(self, **fields: Any) -> Report:
        return Report(free_blocks=self._state()[1], counted=self._answers.counted(), **fields)


def _state(core: Any) -> tuple[bool, int]:
    """In the core's process: whether it has something left to do, and its free blocks."""
    busy = core.scheduler.has_requests() or bool(core.batch_queue)
    return busy, core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
