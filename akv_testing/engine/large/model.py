"""Weights at random, drawn on the device, and what a layer computes but for attention."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from akv.errors import SettingsError
from akv_testing.engine.config import ModelConfig
from akv_testing.engine.pages import DTYPES

#: Base of the RoPE frequencies, as models with long contexts have it.
_ROPE_BASE = 500_000.0
_EPSILON = 1e-5


class LargeModel:
    """Weights in the dtype of the pages. Equal configurations on equal devices are equal models."""

    def __init__(self, config: ModelConfig, device: str = "cpu") -> None:
        """Draw the weights. Raises SettingsError for what this model does not have, by name."""
        groups = config.layer_groups()
        _refuse(config)
        self.config = config
        self.device = torch.device(device)
        self.dtype = DTYPES[groups[0].dtype]
        self.kv_heads = groups[0].kv_heads
        self._generator = torch.Generator(self.device).manual_seed(config.seed)
        self._embedding = self._matrix(config.vocabulary, config.hidden, scale=1.0)
        self.layers = [Layer(self) for _ in range(config.layers)]
        self._final_norm = self.ones(config.hidden)
        self._unembedding = self.matrix(config.hidden, config.vocabulary)
        self._cos, self._sin = _angles(config, self.device)

    @property
    def key(self) -> str:
        """A `model_key` for akv: the weights follow from the configuration, and from the kind of device that draws them."""
        return f"large-{self.config.key}-{self.device.type}"

    def device_name(self) -> str:
        """For people."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def ones(self, size: int) -> Tensor:
        """The weights of a norm."""
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def matrix(self, inputs: int, outputs: int) -> Tensor:
        """Weights that keep the size of what they are applied to."""
        return self._matrix(inputs, outputs, scale=1 / math.sqrt(inputs))

    def embed(self, ids: Tensor) -> Tensor:
        """(tokens,) to (tokens, hidden)."""
        return self._embedding[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, vocabulary)."""
        return norm(hidden, self._final_norm) @ self._unembedding

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, (tokens, 1, head size), for `Layer.query_key_value`."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _matrix(self, inputs: int, outputs: int, scale: float) -> Tensor:
        drawn = torch.randn(inputs, outputs, generator=self._generator, dtype=self.dtype, device=self.device)
        return drawn.mul_(scale)


class Layer:
    """The weights of one layer. Matrices are (inputs, outputs)."""

    def __init__(self, model: LargeModel) -> None:
        config = model.config
        self._heads = [config.heads, model.kv_heads, model.kv_heads]
        self._head_size = config.head_size
        self._attention_norm = model.ones(config.hidden)
        self._query_key_value = model.matrix(config.hidden, sum(self._heads) * config.head_size)
        self._attention_out = model.matrix(config.heads * config.head_size, config.hidden)
        self._mlp_norm = model.ones(config.hidden)
        self._gate_up = model.matrix(config.hidden, 2 * config.intermediate)
        self._down = model.matrix(config.intermediate, config.hidden)

    def query_key_value(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (tokens, hidden), each (tokens, its heads, head size), positions turned in."""
        projected = norm(hidden, self._attention_norm) @ self._query_key_value
        q, k, v = torch.split(projected.view(hidden.shape[0], -1, self._head_size), self._heads, dim=1)
        return _rotated(q, *angles), _rotated(k, *angles), v

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from what came in and (tokens, heads * head size) of attention."""
        hidden = torch.addmm(hidden, attended, self._attention_out)
        gate, up = (norm(hidden, self._mlp_norm) @ self._gate_up).chunk(2, dim=-1)
        return torch.addmm(hidden, functional.silu(gate).mul_(up), self._down)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm."""
    return functional.rms_norm(x, weight.shape, weight, _EPSILON)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    # One addcmul of whole heads: the sines' first half is negative.
    return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)


def _angles(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = _ROPE_BASE ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
    angles = torch.outer(torch.arange(config.max_tokens, dtype=torch.float64), frequencies)
    dtype = DTYPES[config.layer_groups()[0].dtype]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(device, dtype), torch.cat((-sin, sin), dim=-1).to(device, dtype)


def _refuse(config: ModelConfig) -> None:
    groups = config.layer_groups()
    kinds = {(group.dtype, group.kv_heads) for group in groups}
    for is_wrong, field, value, fix in (
        (len(kinds) > 1, "model.groups", sorted(kinds), "give all groups one dtype and one number of KV heads"),
        (any(group.sink_tokens for group in groups), "model.groups", groups, "leave out sinks"),
        (config.drafter != "none", "model.drafter", config.drafter, "leave it out"),
        (config.any_ids, "model.any_ids", config.any_ids, "leave it out"),
    ):
        if is_wrong:
            raise SettingsError(field, value, "the large model cannot run with it", fix)
