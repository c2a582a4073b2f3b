"""What makes two of vLLM's requests the same to the cache: as vLLM's own block hashes have it, in akv's terms (K1).

vLLM hashes, next to the tokens: `cache_salt`, the adapter's name and path, each media item's identifier with its place, and
prompt embeddings. All but the last become a `Scope`; a prompt of embeddings has no tokens to be named by.
"""

from hashlib import blake2b
from typing import Any, NamedTuple

from akv.values.scope import DIGEST_BYTES, Lora, Media, Scope

#: What a request's `kv_transfer_params` may say to akv; true keeps it from loading, or from being saved.
DO_NOT_READ = "akv.do_not_read"
DO_NOT_SAVE = "akv.do_not_save"


class Use(NamedTuple):
    """How a request uses the pool."""

    reads: bool
    saves: bool


def use_of(request: Any) -> Use:
    """Whether this request, a `vllm.v1.request.Request`, may load pages and have its own saved."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return Use(reads=False, saves=False)  # Embeddings: equal placeholders stand for unequal inputs.
    if request.resumable:
        return Use(reads=False, saves=False)  # A stream of inputs: vLLM takes tokens of it back.
    wishes = request.kv_transfer_params or {}
    # vLLM sets the first for prompt logprobs, and for pooling that needs the output of every token (L7).
    reads = not request.skip_reading_prefix_cache and not wishes.get(DO_NOT_READ)
    return Use(reads=bool(reads), saves=not wishes.get(DO_NOT_SAVE))


def scope_of(request: Any, epoch: str = "", *, require_salt: bool = False) -> Scope:
    """What separates this request's tokens from equal ones. `epoch`: what separates the cache from that before its reset; with
    `require_salt` it stands for no salt (X3).
    """
    salt = request.cache_salt
    if epoch and (salt or not require_salt):
        salt = f"{epoch}\0{salt or ''}"
    return Scope(salt=salt, lora=_lora_of(request.lora_request), media=_media_of(request.mm_features))


def _lora_of(adapter: Any) -> Lora | None:
    """The adapter. Its number counts what this server loaded, and names another one elsewhere; so what vLLM itself hashes is
    hashed: its name and path. New weights need a new name or path, as they do in vLLM.
    """
    if adapter is None:
        return None
    named = f"{adapter.lora_name}\0{adapter.lora_path}".encode()
    return Lora(int.from_bytes(blake2b(named, digest_size=8).digest(), "little", signed=True))


def _media_of(features: Any) -> tuple[Media, ...] | None:
    """The media, by position. None, so that nothing is shared, where one has no identifier or they overlap."""
    media: list[Media] = []
    for feature in sorted(features, key=lambda feature: feature.mm_position.offset):
        place = feature.mm_position
        if feature.identifier is None or place.length < 1:
            return None
        if media and place.offset < media[-1].position + media[-1].tokens:
            return None
        digest = blake2b(feature.identifier.encode(), digest_size=DIGEST_BYTES).digest()
        media.append(Media(digest=digest, position=place.offset, tokens=place.length))
    return tuple(media)
