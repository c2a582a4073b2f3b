"""vLLM: `--kv-transfer-config '{"kv_connector": "AkvConnector", "kv_connector_module_path": "akv.engines.vllm", ...}'`.

`connector.py` has vLLM's signatures and nothing else. `scheduler.py` and `worker.py` are its two roles, joined by
`session.py`; `loop_side.py` is what runs on the connector's loop, `ends.py` tells what ended. Where ranks have processes of
their own `ranked_scheduler.py` and `ranked_loop.py` stand in the place of the former, and `rank_role.py` is each rank's.
`configuration.py`, `layout.py` and `identity.py` say what vLLM's configuration, cache and requests are to akv, and refuse
what would not be the same. Nothing but `connector.py` and `stats.py` imports vLLM.
"""

from typing import Any

__all__ = ["AkvConnector"]


def __getattr__(name: str) -> Any:
    """`AkvConnector`, whose bases are vLLM's: imported when vLLM asks for it, once its version has been looked at."""
    if name != "AkvConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from akv.engines.vllm.versions import check_installed  # noqa: PLC0415 - before anything of vLLM is imported

    check_installed()
    from akv.engines.vllm.connector import AkvConnector  # noqa: PLC0415

    return AkvConnector
