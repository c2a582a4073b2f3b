"""Shapes that servers run, and the same small, for tests on a CPU."""

import msgspec

from akv_testing.engine.config import AttentionGroup, ModelConfig

#: Tokens that the RoPE tables reach: 96,000 of a prompt and an answer.
_MAX_TOKENS = 131_072


def _one_in_six(layers: int, window_tokens: int) -> tuple[AttentionGroup, ...]:
    """Five layers with a window, then one with full attention, and so on, as Gemma 3 has them."""
    full = tuple(range(5, layers, 6))
    return (
        AttentionGroup(layers=full, dtype="bfloat16"),
        AttentionGroup(
            layers=tuple(layer for layer in range(layers) if layer not in full), window_tokens=window_tokens, dtype="bfloat16"
        ),
    )


#: The shape of Llama 3 8B: 128 KiB of KV per token.
LLAMA_8B = ModelConfig(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_size=128,
    intermediate=14336,
    vocabulary=128_256,
    max_tokens=_MAX_TOKENS,
    groups=(AttentionGroup(layers=tuple(range(32)), dtype="bfloat16"),),
)
#: The same with 34 layers, five with windows of 1,024 tokens for each one with full attention.
LLAMA_8B_WINDOWS = msgspec.structs.replace(LLAMA_8B, layers=34, groups=_one_in_six(34, 1024))
#: The like, small.
SMALL = ModelConfig(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate=96,
    vocabulary=512,
    max_tokens=4096,
    groups=(AttentionGroup(layers=(0, 1), dtype="bfloat16"),),
)
#: The like with windows, small.
SMALL_WINDOWS = msgspec.structs.replace(SMALL, layers=6, groups=_one_in_six(6, 32))
