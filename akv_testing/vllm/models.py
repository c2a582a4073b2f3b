"""Models small enough for two cores: a configuration each, and no file of weights."""

import json
from pathlib import Path
from typing import Any

#: What both have. The vocabulary is all that their prompts may use.
VOCABULARY = 512
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}

LLAMA = "llama"
GEMMA3 = "gemma3"
#: As LLAMA, with heads of the usual size and number: 32 KiB of KV a token and not 2 (Llama 3 8B has 128).
WIDE = "wide"
#: Tokens that a sliding layer of GEMMA3 sees.
WINDOW_TOKENS = 64

#: By name, what stands in `config.json`.
MODELS: dict[str, dict[str, Any]] = {
    LLAMA: _SHAPE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    GEMMA3: _SHAPE
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
}


MODELS[WIDE] = MODELS[LLAMA] | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}


def write_model(name: str, folder: Path) -> Path:
    """Write the configuration of a model into a folder of its own below `folder`; return that."""
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return model
