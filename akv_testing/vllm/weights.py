"""Weights that follow from their names: every process has the same ones, and each token of a prompt shows in the answer.

vLLM's own dummy weights are so small that hardly anything of a prompt reaches the logits, and wrong pages would go unseen.
"""

import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

#: What `load_format` says.
SEEDED = "akv_seeded"


@register_model_loader(SEEDED)
class SeededLoader(BaseModelLoader):
    """Draws every parameter from a generator that is seeded with the parameter's name."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill all parameters, such that activations neither vanish nor grow from layer to layer."""
        # Gemma multiplies by one plus the weight of a norm.
        norm = 0.0 if "gemma" in str(model_config.hf_text_config.model_type) else 1.0
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(norm)
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn / parameter.shape[-1] ** 0.5)
