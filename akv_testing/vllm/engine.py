"""One vLLM engine, stepped by hand as its own server process steps it. Imported by server processes alone."""

import threading
import time
from collections import Counter, defaultdict
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from akv_testing.vllm.protocol import AKV, MOONCAKE_STORE, Abort, Answer, Generate, Options, Report, Reset, Settle
from akv_testing.vllm.weights import SEEDED

_CONNECTORS: dict[str, dict[str, Any]] = {
    MOONCAKE_STORE: {"kv_connector": "MooncakeStoreConnector"},
    AKV: {"kv_connector": "AkvConnector", "kv_connector_module_path": "akv.engines.vllm"},
}
#: Seconds that vLLM's server rests after a step without a pass, which lets its other threads run.
_REST_S = 0.001
#: Seconds after which requests that have not ended count as stuck.
_STUCK_S = 60.0


class Engine:
    """vLLM's engine with its scheduler and its worker in this process and thread."""

    def __init__(self, options: Options) -> None:
        arguments = EngineArgs(
            model=options.model,
            load_format=SEEDED,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=options.tokens_per_block,
            max_model_len=2048,
            num_gpu_blocks_override=options.blocks,
            kv_cache_memory_bytes=1 << 30,
            seed=0,
            kv_transfer_config=_transfer(options),
        )
        config = arguments.create_engine_config()
        self._engine = LLMEngine(config, Executor.get_class(config), log_stats=True, multiprocess_mode=False)
        self._core: Any = self._engine.engine_core.engine_core
        self._step_fn = self._core.step_fn
        self._core.step_fn = self._watched_step
        self._numbers = 0
        self._passed = False
        self._steps, self._passes = 0, 0
        #: By vLLM's id of the request.
        self._prefills: dict[str, Any] = {}
        self._preemptions: Counter[str] = Counter()
        self._counted: defaultdict[str, float] = defaultdict(float)

    def generate(self, command: Generate) -> Report:
        """Answer prompts; the time is from the first request's arrival to the last one's end."""
        self._steps, self._passes = 0, 0
        began, cpu_before = time.perf_counter(), time.process_time()
        ids = [self._add(prompt, command.tokens) for prompt in command.prompts]
        ended: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            ended.update((output.request_id, output) for output in self._step() if output.finished)
            if time.perf_counter() > began + _STUCK_S:
                raise TimeoutError(f"{len(ids) - len(ended)} of {len(ids)} requests have not ended after {_STUCK_S:g} s")
        seconds = time.perf_counter() - began
        answers = [self._answer(one, ended[one.partition("-")[0]]) for one in ids]
        return self._report(seconds=seconds, cpu_seconds=time.process_time() - cpu_before, answers=answers)

    def abort(self, command: Abort) -> Report:
        """Begin a request, step until it waits for its pages, and abort it then."""
        began = time.perf_counter()
        request_id = self._add(command.prompt, 4)
        request = self._core.scheduler.requests[request_id]
        while request.status.name != "WAITING_FOR_REMOTE_KVS":
            self._step()
            if request.is_finished() or time.perf_counter() > began + _STUCK_S:
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
        parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        return str(self._engine.add_request(str(self._numbers), {"prompt_token_ids": prompt}, parameters))

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
            self._count(of_client.scheduler_stats)
            for output in of_client.outputs:
                if output.prefill_stats is not None:
                    self._prefills[output.request_id] = output.prefill_stats
                preempted = [event for event in output.events or () if event.type == EngineCoreEventType.PREEMPTED]
                self._preemptions[output.request_id] += len(preempted)
        return outputs, self._passed

    def _count(self, stats: Any) -> None:
        for name, count in ((stats and stats.kv_connector_stats) or {}).items():
            if isinstance(count, int | float):
                self._counted[name] += count

    def _answer(self, request_id: str, output: Any) -> Answer:
        (completion,) = output.outputs
        prefill = self._prefills.pop(request_id)
        tokens = list(completion.token_ids)
        return Answer(
            tokens=tokens,
            logprobs=[each[token].logprob for each, token in zip(completion.logprobs, tokens, strict=True)],
            finish_reason=str(completion.finish_reason),
            local_tokens=prefill.num_local_cached_tokens,
            external_tokens=prefill.num_external_cached_tokens,
            cached_tokens=output.num_cached_tokens,
            preemptions=self._preemptions.pop(request_id, 0),
        )

    def _report(self, **fields: Any) -> Report:
        counted = dict(self._counted)
        self._counted.clear()
        free = self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return Report(steps=self._steps, passes=self._passes, free_blocks=free, counted=counted, **fields)


def _transfer(options: Options) -> dict[str, Any] | None:
    if options.connector not in _CONNECTORS:
        return None
    return {**_CONNECTORS[options.connector], "kv_role": "kv_both", "kv_connector_extra_config": dict(options.extra)}
