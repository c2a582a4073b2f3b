"""The part of SGLang's `--hicache-storage-backend-extra-config` that is akv's."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from akv.errors import SettingsError
from akv.settings import Settings, read_settings
from akv.settings_sources import MOONCAKE_FIELDS, layer_of_mooncake

#: The field that holds akv's settings, nested as in a file of akv's own; SGLang's own fields stand beside it.
SECTION = "akv"
#: Settings that a backend cannot honour, what they must be, and why: SGLang hashes tokens, scopes and media by itself.
_FIXED: dict[str, tuple[object, str]] = {
    "key_format": ("akv", "pages are named by SGLang's own hashes, which no other engine computes"),
    "require_salt": (False, "SGLang says of no page whether its request had a salt; salts are part of its hashes"),
}


def settings_of(config: Any) -> Settings:
    """Checked settings: those of `config.extra_config["akv"]`, over akv's file, its variables and the rest of its sources.

    Fields with which SGLang's own backend for Mooncake joins a pool say the same here, and may stay where they are.

    `config` is SGLang's `HiCacheStorageConfig`. Raises SettingsError (fault of whoever configured SGLang).
    """
    extra: Mapping[str, Any] = config.extra_config or {}
    own = extra.get(SECTION, {})
    if not isinstance(own, Mapping):
        raise SettingsError(
            SECTION, own, "it holds akv's settings by name", 'Write {"akv": {"model_key": ..., "store": {...}}}.'
        )
    astray = sorted(set(extra) & set(Settings.__struct_fields__))
    if astray:
        raise SettingsError(
            astray[0],
            extra[astray[0]],
            "it is a setting of akv's, and stands among SGLang's own",
            f"Write it inside the field {SECTION!r} of the extra config.",
        )
    settings = read_settings(overrides={**_pool_of(config, extra), **own})
    for name, (value, why) in _FIXED.items():
        if (found := getattr(settings, name)) != value:
            raise SettingsError(name, found, why, f"Leave it out, or set it to {value!r}.")
    if getattr(config, "dcp_size", 1) > 1:
        raise SettingsError(
            "dcp_size", config.dcp_size, "decode context parallelism splits a page over ranks, which akv does not do", "Use 1."
        )
    return settings


def is_v1(config: Any) -> bool:
    """Whether SGLang hands over where pages lie, and not flat copies of them; as SGLang itself reads the field."""
    return bool((config.extra_config or {}).get("interface_v1", 0))


def _pool_of(config: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What SGLang's own fields say of the pool, by dotted name, as its backend for Mooncake reads them on this rank."""
    given = {field: extra[field] for field in MOONCAKE_FIELDS if field in extra}
    found, _ = layer_of_mooncake(json.dumps(given), "SGLang's extra config")
    pool: dict[str, Any] = {name: each.value for name, each in found.items()}
    if (whole := pool.get("store.segment_bytes")) is not None:
        pool["store.segment_bytes"] = whole // (config.tp_size * config.pp_size)
    if str(pool.get("store.device_name", "")).strip().startswith("{"):
        # One name for all ranks, or one for each: {"0": "mlx5_0", "1": "mlx5_1"}. Anything else is refused as a name.
        with suppress(ValueError):
            pool["store.device_name"] = json.loads(pool["store.device_name"]).get(str(config.tp_rank), "")
    return pool
