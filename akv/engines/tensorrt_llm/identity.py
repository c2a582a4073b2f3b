"""What of TensorRT-LLM's requests separates equal tokens from each other, and which of them are served at all (K1, K5, L7)."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from akv.values.scope import Lora, Media, Scope

#: What a request may carry that changes its KV and is in no digest: such a request neither reads nor writes (K5).
_UNDIGESTED = ("prompt_embedding_table", "encoder_tokens", "input_token_extra_ids", "lora_weights")
#: What the digests of media name, where there are any.
_OF_MEDIA = ("multimodal_embedding", "py_multimodal_data")
#: How the versions say that a request only fills a batch or a graph.
_DUMMY = ("is_dummy_request", "is_attention_dp_dummy", "is_cuda_graph_dummy", "is_dummy")


class Asked(NamedTuple):
    """A request of the engine as the loop's side needs it: read in the executor's thread, where its objects belong."""

    engine_id: int
    #: Everything it has so far: the prompt, and behind a preemption what was generated.
    tokens: Sequence[int]
    scope: Scope
    #: False where prompt logits are wanted (L7).
    reads_cache: bool


def is_served(request: Any) -> bool:
    """Whether the request is one of a client's that computes its prompt here."""
    if getattr(request, "is_generation_only_request", False) is True:
        return False
    return not any(getattr(request, name, False) is True for name in _DUMMY)


def asked(request: Any) -> Asked:
    """Read a request."""
    tokens = request.get_tokens(0)
    logits = getattr(request, "py_return_context_logits", False) or getattr(request, "return_context_logits", False)
    return Asked(int(request.request_id), tokens, scope_of(request), not logits)


def scope_of(request: Any) -> Scope:
    """Salt, adapter and media of a request.

    The media are None where there are some and their digests are not all there, and where anything else stands beside the
    tokens that no digest names: akv then leaves the request alone.
    """
    task = getattr(request, "lora_task_id", None)
    return Scope(salt=_salt(request), lora=None if task is None else Lora(int(task)), media=_media(request, task))


def _salt(request: Any) -> str | None:
    salt = getattr(request, "cache_salt", None)
    if isinstance(salt, str):
        return salt
    # Versions that know the salt only by the number that they derived from it.
    number = getattr(request, "cache_salt_id", None)
    return None if number is None else str(int(number))


def _media(request: Any, task: Any) -> tuple[Media, ...] | None:
    hashes, positions, lengths = (
        getattr(request, f"multimodal_{name}", None) or () for name in ("hashes", "positions", "lengths")
    )
    # Beside media, too: their digests say nothing of it.
    beside = [name for name in _UNDIGESTED if name != "lora_weights" or task is None]
    if any(getattr(request, name, None) is not None for name in (*beside, *(() if hashes else _OF_MEDIA))):
        return None
    if not hashes:
        return None if positions else ()
    if not len(hashes) == len(positions) == len(lengths) or any(len(numbers) != 8 for numbers in hashes):
        return None
    return tuple(
        Media(digest=digest(numbers), position=int(position), tokens=int(length))
        for numbers, position, length in zip(hashes, positions, lengths, strict=True)
    )


def digest(numbers: Sequence[int]) -> bytes:
    """The 32 bytes of a media digest that the engine keeps as eight int32: each big-endian (K1)."""
    return struct.pack(">8I", *(int(number) & 0xFFFFFFFF for number in numbers))
