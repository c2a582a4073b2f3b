"""What is said to a server process, and what it answers. Everything is JSON: a server that dies leaves text to read."""

from collections.abc import Mapping

import msgspec

#: vLLM's connectors that a server can run with: none, its own for a Mooncake store, and akv's.
NO_CONNECTOR = "none"
MOONCAKE_STORE = "mooncake_store"
AKV = "akv"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One server."""

    #: The folder with the model's `config.json`.
    model: str
    connector: str
    #: Blocks of the KV cache. 61 hold a prompt of 1,921 tokens.
    blocks: int = 1024
    tokens_per_block: int = 32
    #: Tokens that one pass computes, at most.
    pass_tokens: int = 2048
    #: Schedule each step before the one in front of it is sampled, as vLLM does on a GPU.
    ahead: bool = False
    #: The engine's core in a process of its own, as `vllm serve` has it; else in the server's, which steps it.
    apart: bool = False
    #: Tensor-parallel ranks, each in a process of its own; 0: one rank, in the scheduler's process.
    ranks: int = 0
    #: What `kv_connector_extra_config` says.
    extra: Mapping[str, object] = {}


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """To the nursery: fork a server that connects to `address` and writes what it logs to `log`."""

    address: str
    log: str
    options: Options


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a server."""


class Generate(Command, frozen=True, kw_only=True):
    """Answer prompts, all at once."""

    prompts: list[list[int]]
    #: Tokens of each answer.
    tokens: int = 4


class Abort(Command, frozen=True, kw_only=True):
    """Ask a prompt, and abort it as soon as the request waits for its pages. Of a server that steps its engine."""

    prompt: list[int]


class Leave(Command, frozen=True, kw_only=True):
    """Ask prompts, all at once; their clients go away one after the other, whether they are answered or not. Of a server whose
    core is apart.
    """

    prompts: list[list[int]]
    tokens: int = 4
    #: Seconds after which the last one goes.
    within_s: float


class Reset(Command, frozen=True, kw_only=True):
    """Forget the local cache."""

    #: The connector too, as vLLM does when it sleeps, pauses or gets new weights.
    connector: bool = False


class Settle(Command, frozen=True, kw_only=True):
    """Go on until nothing is left to do: loads and saves of requests that have ended are over."""

    deadline_s: float = 30.0


class FailGets(Command, frozen=True, kw_only=True):
    """From now on every get of the store's client fails, or none does."""

    fail: bool
    #: Those of this rank alone; None: of every one.
    rank: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt came to."""

    tokens: list[int]
    #: Of each of these tokens.
    logprobs: list[float]
    finish_reason: str
    #: Tokens of the prompt that vLLM counts as found in its own cache, and as brought by the connector, when it scheduled the
    #: request first.
    local_tokens: int
    external_tokens: int
    #: Tokens of the prompt that were not computed in the end.
    cached_tokens: int
    preemptions: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A server's answer to every command."""

    #: Empty, or why the command failed.
    error: str = ""
    #: Seconds that it took, and for `Generate` those of processor time in all threads of the server.
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    answers: list[Answer] = []
    #: Steps of the engine, and those of them in which the model ran.
    steps: int = 0
    passes: int = 0
    free_blocks: int = 0
    #: For `Abort`: the status in which the request was aborted. For `Reset`: whether the cache could be reset.
    status: str = ""
    done: bool = True
    #: Gets of the store's client that were made to fail.
    failed_gets: int = 0
    #: What vLLM's metrics say that the connector counted since the command before.
    counted: dict[str, float] = {}
