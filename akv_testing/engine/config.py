"""How large the reference engine's model is, and how the engine runs it. The presets are `TINY`, for tests, and `DEMO`."""

from hashlib import blake2b

import msgspec

from akv.errors import SettingsError

#: Bytes are tokens; above them stand the special tokens of `akv_testing.engine.text`.
VOCABULARY = 260


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with random weights. Equal configurations are equal models, in every process."""

    layers: int
    hidden: int
    #: Query heads. A multiple of `kv_heads`: each KV head serves as many query heads (grouped-query attention).
    heads: int
    kv_heads: int
    #: Elements per head; even, because RoPE turns them in pairs.
    head_size: int
    #: Width of the SwiGLU.
    intermediate: int
    #: Tokens in the vocabulary; as many bytes as there are, and the special tokens.
    vocabulary: int = VOCABULARY
    #: Tokens that a sequence may have at most; the length of the RoPE table.
    max_tokens: int = 16384
    #: Seeds the weights.
    seed: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token takes in all layers, float32."""
        return 4 * 2 * self.layers * self.kv_heads * self.head_size

    @property
    def key(self) -> str:
        """A `model_key` for akv: names the weights, because they follow from these fields."""
        return f"akv-reference-{blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()}"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine runs its model. Two engines compute equal bits if all fields but `pages` and the two maxima are equal."""

    model: ModelConfig
    #: T: tokens in a page.
    tokens_per_block: int = 32
    #: Pages of each layer group.
    pages: int = 512
    #: Layer groups that the layers are split over, evenly and in order. More than one is for tests of several page tables.
    layer_groups: int = 1
    #: Where a prompt is cut, in tokens: chunks end at multiples of this, wherever they begin. So what is computed together
    #: depends on where the request resumes, and never on what else is in the pass.
    chunk_tokens: int = 256
    #: Tokens that one pass computes at most.
    max_tokens_per_pass: int = 512
    #: Requests that one pass computes for at most.
    max_running: int = 32
    #: CPU threads of torch, which has one number for the whole process. Bits may differ between numbers. One is the default:
    #: torch's threads spin while they wait for each other, and crawl when anything else needs the cores.
    threads: int = 1
    #: Where the pages lie, for torch: "cpu", "cuda", "cuda:1". The weights have to lie there too.
    device: str = "cpu"


def check_config(config: EngineConfig) -> None:
    """Refuse a configuration that cannot run, by name. Raises SettingsError (fault of whoever wrote it)."""
    model = config.model
    wrong = [
        (model.heads % model.kv_heads != 0, "model.heads", model.heads, f"use a multiple of kv_heads ({model.kv_heads})"),
        (model.head_size % 2 != 0, "model.head_size", model.head_size, "use an even number"),
        (model.layers % config.layer_groups != 0, "layer_groups", config.layer_groups, f"use a divisor of {model.layers}"),
        (config.tokens_per_block < 1, "tokens_per_block", config.tokens_per_block, "use at least 1"),
        (config.pages < 1, "pages", config.pages, "use at least 1"),
        (config.chunk_tokens < 1, "chunk_tokens", config.chunk_tokens, "use at least 1"),
        (config.max_running < 1, "max_running", config.max_running, "use at least 1"),
        (
            # Then a chunk fits beside any number of decoding requests, and prompts are never starved by them.
            config.max_tokens_per_pass < config.chunk_tokens + config.max_running,
            "max_tokens_per_pass",
            config.max_tokens_per_pass,
            "use at least chunk_tokens + max_running",
        ),
    ]
    for is_wrong, field, value, fix in wrong:
        if is_wrong:
            raise SettingsError(field, value, "the reference engine cannot run with it", fix)


#: Milliseconds per request on one core: for tests.
TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_size=8, intermediate=64, max_tokens=2048)
#: Large enough that computing a prompt of thousands of tokens is clearly slower than loading its pages, and small enough that
#: computing it a few times takes seconds on two cores: for the demo.
DEMO = ModelConfig(layers=4, hidden=256, heads=4, kv_heads=2, head_size=48, intermediate=704)
