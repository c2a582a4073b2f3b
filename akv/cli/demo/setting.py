"""What both of the demo's serving processes must have alike: model, pages, settings."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from akv.cli.demo.scaling import VOCABULARY, scaled_lengths
from akv.cli.demo.trace import TRACE_BLOCK_TOKENS, TraceRow
from akv.settings import Settings, StoreSettings

if TYPE_CHECKING:
    from akv_testing.engine import EngineConfig


class DemoLayout(StrEnum):
    """Which model the conversations are held with."""

    #: Full attention in every layer.
    FULL = "full"
    #: Full attention and sliding windows in turn, with sinks; two dtypes and three sizes of pages.
    SLIDING = "sliding"
    #: Full attention, and a drafter whose KV lies in the same pages.
    DRAFTER = "drafter"
    #: As "sliding", and a drafter whose KV is a layer group of its own, in bfloat16.
    SLIDING_DRAFTER = "sliding-drafter"

    @property
    def has_windows(self) -> bool:
        """Whether it can be resumed at ends alone where window pages lie."""
        return self in {DemoLayout.SLIDING, DemoLayout.SLIDING_DRAFTER}

    @property
    def has_drafter(self) -> bool:
        """Whether answers are drafted and verified."""
        return self in {DemoLayout.DRAFTER, DemoLayout.SLIDING_DRAFTER}


#: Bytes of memory that the demo's lender gives to the pool.
SEGMENT_BYTES = 512 * 1024**2
#: Tokens of each answer. Few: the demo is about prompts.
ANSWER_TOKENS = 12
TOKENS_PER_BLOCK = 32
#: Tokens that the drafter drafts in a pass.
DRAFT_TOKENS = 3
#: Pages of each engine's cache, for prompts of at most this many tokens in all conversations together.
CACHE_TOKENS = 96 * 1024
#: With windows: how far behind a longer hit a lookup resumes (R), and how far behind their windows requests keep pages. Below
#: the default, so that prompts of a demo's length show what lies within it and what lies beyond.
REWIND_TOKENS = 128
#: For traces: at the default scale a block of the trace is one of these.
TRACE_TOKENS_PER_BLOCK = 16
#: Tokens of one request, prompt and answer, at most.
TRACE_MAX_TOKENS = 16 * 1024
#: What `trace_engine_config().model.kv_bytes_per_token` is, for those who do not load torch.
TRACE_KV_BYTES_PER_TOKEN = 1024


def engine_config(layout: DemoLayout, device: str = "cpu") -> "EngineConfig":
    """The reference engine's model and cache; one thread, so that bits do not depend on the number of cores."""
    from akv_testing.engine import (  # noqa: PLC0415 - loads torch
        DEMO,
        DEMO_DRAFTER,
        DEMO_SLIDING,
        DEMO_SLIDING_DRAFTER,
        EngineConfig,
    )

    models = {
        DemoLayout.FULL: DEMO,
        DemoLayout.SLIDING: DEMO_SLIDING,
        DemoLayout.DRAFTER: DEMO_DRAFTER,
        DemoLayout.SLIDING_DRAFTER: DEMO_SLIDING_DRAFTER,
    }
    return EngineConfig(
        model=models[layout],
        tokens_per_block=TOKENS_PER_BLOCK,
        pages=CACHE_TOKENS // TOKENS_PER_BLOCK,
        window_retention_tokens=REWIND_TOKENS if layout.has_windows else 0,
        contiguous_pages=layout.has_windows,
        draft_tokens=DRAFT_TOKENS if layout.has_drafter else 0,
        device=device,
    )


def trace_engine_config() -> "EngineConfig":
    """The engine that replays traces.

    Its chunks are of one block each: then a page's bits follow from its prefix alone, and not from where a request resumed, so
    that two requests that compute a block at the same time give the same page. It has a small model, since a trace has
    thousands of blocks.
    """
    from akv_testing.engine import EngineConfig, ModelConfig  # noqa: PLC0415 - loads torch

    model = ModelConfig(
        layers=2,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_size=32,
        intermediate=256,
        vocabulary=VOCABULARY,
        max_tokens=TRACE_MAX_TOKENS,
    )
    return EngineConfig(
        model=model,
        tokens_per_block=TRACE_TOKENS_PER_BLOCK,
        pages=CACHE_TOKENS // TRACE_TOKENS_PER_BLOCK,
        chunk_tokens=TRACE_TOKENS_PER_BLOCK,
    )


def trace_segment_bytes(rows: Sequence[TraceRow], scale: int) -> int:
    """Memory that holds every page of a replayed trace, with room for how the pool cuts it up."""
    size = TRACE_TOKENS_PER_BLOCK
    blocks = len({block for row in rows for block in row.hash_ids}) * (TRACE_BLOCK_TOKENS // scale // size)
    # Blocks that an answer completes; the first of them holds the end of the prompt, which no trace's block fills.
    blocks += sum(1 + scaled_lengths(row, scale)[1] // size for row in rows)
    return max(SEGMENT_BYTES, 2 * blocks * size * TRACE_KV_BYTES_PER_TOKEN)


def settings(master_address: str, model_key: str) -> Settings:
    """A client of the demo's pool that lends nothing: pages outlive the process that computed them."""
    return Settings(
        model_key=model_key,
        store=StoreSettings(master_address=master_address, segment_bytes=0),
        staging_buffer_bytes=64 * 1024**2,
        rewind_tokens=REWIND_TOKENS,
        # The demo shows what is in the pool, not how an overloaded machine degrades.
        lookup_deadline_s=10.0,
        load_deadline_s=30.0,
    )
