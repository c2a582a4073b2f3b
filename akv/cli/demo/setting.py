"""What both of the demo's serving processes must have alike: model, pages, settings."""

from typing import TYPE_CHECKING

from akv.settings import Settings, StoreSettings

if TYPE_CHECKING:
    from akv_testing.engine import EngineConfig

#: Bytes of memory that the demo's lender gives to the pool.
SEGMENT_BYTES = 512 * 1024**2
#: Tokens of each answer. Few: the demo is about prompts.
ANSWER_TOKENS = 12
TOKENS_PER_BLOCK = 32
#: Pages of each engine's cache, for prompts of at most this many tokens in all conversations together.
CACHE_TOKENS = 96 * 1024


def engine_config() -> "EngineConfig":
    """The reference engine's model and cache; one thread, so that bits do not depend on the number of cores."""
    from akv_testing.engine import DEMO, EngineConfig  # noqa: PLC0415 - loads torch

    return EngineConfig(model=DEMO, tokens_per_block=TOKENS_PER_BLOCK, pages=CACHE_TOKENS // TOKENS_PER_BLOCK)


def settings(master_address: str) -> Settings:
    """A client of the demo's pool that lends nothing: pages outlive the process that computed them."""
    return Settings(
        model_key=engine_config().model.key,
        store=StoreSettings(master_address=master_address, segment_bytes=0),
        staging_buffer_bytes=64 * 1024**2,
        # The demo shows what is in the pool, not how an overloaded machine degrades.
        lookup_deadline_s=10.0,
        load_deadline_s=30.0,
    )
