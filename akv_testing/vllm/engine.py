"""One vLLM engine, stepped by hand as its own server process steps it. Imported by server processes alone."""

import threading
import time
from functools import partial
from multiprocessing import get_context
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor, multiproc_executor

from akv_testing.vllm.ahead import schedule_ahead
from akv_testing.vllm.answers import Answers, named
from akv_testing.vllm.protocol import AKV, MOONCAKE_STORE, Abort, Generate, Options, Report, Reset, Settle
from akv_testing.vllm.weights import SEEDED

_CONNECTORS: dict[str, dict[str, Any]] = {
    MOONCAKE_STORE: {"kv_connector": "MooncakeStoreConnector"},
    AKV: {"kv_connector": "AkvConnector", "kv_connector_module_path": "akv.engines.vllm"},
}
# On a CPU vLLM spawns the processes of ranks, whatever it is told, and each would import everything anew, for ten seconds. A
# server has imported it, and has one thread when it makes its ranks.
multiproc_executor.get_mp_context = partial(get_context, "fork")
#: Seconds that vLLM's server rests after a step without a pass, which lets its other threads run.
_REST_S = 0.001
#: Seconds after which requests that have not ended count as stuck.
STUCK_S = 60.0


def config_of(options: Options) -> Any:
    """The `VllmConfig` of a server."""
    arguments = EngineArgs(
        model=options.model,
        load_format=SEEDED,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=options.tokens_per_block,
        max_model_len=2048,
        max_num_batched_tokens=options.pass_tokens,
        num_gpu_blocks_override=options.blocks,
        kv_cache_memory_bytes=1 << 30,
        seed=0,
        # Scheduler and worker in one process, as by default on a GPU; by this name vLLM does so on a CPU, too.
        distributed_executor_backend="mp" if options.ranks else "vllm.v1.executor.UniProcExecutor",
        tensor_parallel_size=max(1, options.ranks),
        kv_transfer_config=_transfer(options),
    )
    config = arguments.create_engine_config()
    if options.ahead:
        schedule_ahead(config)
    return config


def sampling(tokens: int) -> SamplingParams:
    """So many tokens, always the same ones, with their log probabilities."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)


class Engine:
    """vLLM's engine with its scheduler and its worker in this process and thread."""

    def __init__(self, options: Options) -> None:
        config = config_of(options)
        self._engine = LLMEngine(config, Executor.get_class(config), log_stats=True, multiprocess_mode=False)
        self._core: Any = self._engine.engine_core.engine_core
        self._step_fn = self._core.step_fn
        self._core.step_fn = self._watched_step
        self._numbers = 0
        self._passed = False
        self._steps, self._passes = 0, 0
        self._answers = Answers()

    def generate(self, command: Generate) -> Report:
        """Answer prompts; the time is from the first request's arrival to the last one's end."""
        self._steps, self._passes = 0, 0
        began, cpu_before = time.perf_counter(), time.process_time()
        ids = [self._add(prompt, command.tokens) for prompt in command.prompts]
        ended: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            ended.update((output.request_id, output) for output in self._step() if output.finished)
            if time.perf_counter() > began + STUCK_S:
                raise TimeoutError(f"{len(ids) - len(ended)} of {len(ids)} requests have not ended after {STUCK_S:g} s")
        seconds = time.perf_counter() - began
        answers = [self._answers.of(ended[named(one)]) for one in ids]
        return self._report(seconds=seconds, cpu_seconds=time.process_time() - cpu_before, answers=answers)

    def abort(self, command: Abort) -> Report:
        """Begin a request, step until it waits for its pages, and abort it then."""
        began = time.perf_counter()
        request_id = self._add(command.prompt, 4)
        request = self._core.scheduler.requests[request_id]
        while request.status.name != "WAITING_FOR_REMOTE_KVS":
            self._step()
            if request.is_finished() or time.perf_counter() > began + STUCK_S:
                raise RuntimeError(f"the request never waited for its pages, it is {request.status.name}")
        status = request.status.name
        self._engine.abort_request([request_id], internal=True)
        return self._report(seconds=time.perf_counter() - began, status=status)

    def settle(self, command: Settle) -> Report:
        """Step as vLLM's server does while its scheduler has something left to do."""
        began = time.perf_counter()
        while self._core.scheduler.has_requests():
            self._step()
            if time.perf_counter() > began + command.deadline_s:
                raise TimeoutError(f"the scheduler still has requests after {command.deadline_s:g} s")
        return self._report(seconds=time.perf_counter() - began)

    def reset(self, command: Reset) -> Report:
        """Forget the local cache, as an operator may ask a server."""
        return self._report(done=self._engine.reset_prefix_cache(reset_connector=command.connector))

    def close(self) -> None:
        """End the connector as a server that is told to end does."""
        self._engine.engine_core.shutdown()

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._numbers += 1
        return str(self._engine.add_request(str(self._numbers), {"prompt_token_ids": prompt}, sampling(tokens)))

    def _step(self) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        self._steps += 1
        self._passes += self._passed
        if not self._passed and self._core.scheduler.has_requests():
            threading.Event().wait(_REST_S)
        return outputs

    def _watched_step(self) -> Any:
        outputs, self._passed = self._step_fn()
        for of_client in (outputs or {}).values():
            self._answers.see_stats(of_client.scheduler_stats)
            self._answers.see(of_client.outputs)
        return outputs, self._passed

    def _report(self, **fields: Any) -> Report:
        free = self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return Report(steps=self._steps, passes=self._passes, free_blocks=free, counted=self._answers.counted(), **fields)


def _transfer(options: Options) -> dict[str, Any] | None:
    if options.connector not in _CONNECTORS:
        return None
    return {**_CONNECTORS[options.connector], "kv_role": "kv_both", "kv_connector_extra_config": dict(options.extra)}
