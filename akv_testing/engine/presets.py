"""Models to begin with: small ones for tests, larger ones for the demo; each with windows, and with a drafter."""

import msgspec

from akv_testing.engine.config import AttentionGroup, ModelConfig

#: Milliseconds per request on one core: for tests.
TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_size=8, intermediate=64, max_tokens=2048)
#: Large enough that computing a prompt of thousands of tokens is clearly slower than loading its pages, and small enough that
#: computing it a few times takes seconds on two cores: for the demo.
DEMO = ModelConfig(layers=4, hidden=256, heads=4, kv_heads=2, head_size=48, intermediate=704)
#: As `TINY`, with full attention and windows in turn, as published models have it: other dtypes, heads and page sizes.
TINY_SLIDING = ModelConfig(
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_size=8,
    intermediate=64,
    max_tokens=2048,
    groups=(
        AttentionGroup(layers=(0, 2)),
        AttentionGroup(layers=(1,), window_tokens=20, sink_tokens=3, dtype="bfloat16"),
        AttentionGroup(layers=(3,), window_tokens=50, kv_heads=4),
    ),
)
#: As `DEMO`, with windows in turn. 32 tokens are pages of 48, 12 and 24 KiB.
DEMO_SLIDING = msgspec.structs.replace(
    DEMO,
    groups=(
        AttentionGroup(layers=(0, 2)),
        AttentionGroup(layers=(1,), window_tokens=200, sink_tokens=40, kv_heads=1),
        AttentionGroup(layers=(3,), window_tokens=331, dtype="bfloat16", kv_heads=4),
    ),
)
#: As `TINY`, with a drafter whose KV lies in the target's pages.
TINY_DRAFTER = msgspec.structs.replace(TINY, drafter="eagle3")
#: As `TINY_SLIDING`, with a drafter whose KV is a layer group of its own, bfloat16.
TINY_SLIDING_DRAFTER = msgspec.structs.replace(
    TINY_SLIDING, drafter="eagle3", groups=(*TINY_SLIDING.groups, AttentionGroup(layers=(4,), dtype="bfloat16"))
)
#: As `DEMO`, with a drafter whose KV lies in the target's pages.
DEMO_DRAFTER = msgspec.structs.replace(DEMO, drafter="eagle3")
#: As `DEMO_SLIDING`, with a drafter whose KV is a layer group of its own, bfloat16.
DEMO_SLIDING_DRAFTER = msgspec.structs.replace(
    DEMO_SLIDING, drafter="eagle3", groups=(*DEMO_SLIDING.groups, AttentionGroup(layers=(4,), dtype="bfloat16"))
)
