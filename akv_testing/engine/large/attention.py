"""Attention over what lies in the pages: of a chunk of a prompt, and of one token each of many sequences."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

#: Tokens whose values are weighed in one product. A product over a whole context would be eight blocks on a device of many.
_SPLIT_TOKENS = 1024
#: What the flash kernel computes with.
_FLASH_DTYPES = frozenset({torch.bfloat16, torch.float16})


def attend_chunk(q: Tensor, keys: Tensor, values: Tensor, window_tokens: int) -> Tensor:
    """Attention of the last tokens of a sequence: (tokens, heads * head size).

    `q`: (tokens, heads, head size); `keys` and `values`: (KV heads, tokens, head size), of adjacent positions, the last
    of which is the last query's. A `window_tokens` of 0 is full attention.
    """
    count, length = q.shape[0], keys.shape[1]
    if window_tokens and length > window_tokens:
        if q.is_cuda and q.dtype in _FLASH_DTYPES:
            return _windowed_flash(q, keys, values, window_tokens).reshape(count, -1)
        mask = _window_mask(count, length, window_tokens, q.device)
    else:
        # The last query sees all; SDPA's own `is_causal` would line up the first one with the first key.
        mask = causal_lower_right(count, length)
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, enable_gqa=True
    )
    return attended[0].transpose(0, 1).reshape(count, -1)


def _windowed_flash(q: Tensor, keys: Tensor, values: Tensor, window_tokens: int) -> Tensor:
    """SDPA's own flash kernel, which knows windows, though SDPA does not pass them on."""
    count, length = q.shape[0], keys.shape[1]
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        q.unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        *(None, None, count, length),
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        window_size_left=window_tokens - 1,
        window_size_right=0,
    )[0]
    return attended[0]


@lru_cache(maxsize=4)
def _window_mask(count: int, length: int, window_tokens: int, device: torch.device) -> Tensor:
    rows = torch.arange(length - count, length, device=device).unsqueeze(1)
    columns = torch.arange(length, device=device)
    return (columns <= rows) & (columns > rows - window_tokens)


def attend_tokens(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Attention of one token of each sequence: (sequences, heads * head size).

    `q`: (sequences, heads, head size); `keys` and `values`: (sequences * KV heads, tokens, head size); `hidden`: what to add
    to the scores, (sequences, 1, tokens), float32. Written out, because a context's end lies on the device: a graph that is
    replayed has the shapes of its capture.
    """
    sequences, heads, size = q.shape
    kv_heads, length = keys.shape[0] // sequences, keys.shape[1]
    scores = torch.bmm((q * size**-0.5).view(sequences * kv_heads, -1, size), keys.transpose(1, 2))
    scores = scores.view(sequences, heads, length).float() + hidden
    weights = scores.softmax(dim=-1).to(values.dtype).view(sequences * kv_heads, -1, length)
    parts = length // _SPLIT_TOKENS if length % _SPLIT_TOKENS == 0 else 1
    if parts < 2:
        return torch.bmm(weights, values).view(sequences, -1)
    weights = weights.view(len(weights), -1, parts, length // parts).transpose(1, 2).flatten(0, 1)
    weighed = torch.bmm(weights, values.view(-1, length // parts, size)).view(-1, parts, heads // kv_heads, size)
    return weighed.float().sum(dim=1).to(values.dtype).view(sequences, -1)
