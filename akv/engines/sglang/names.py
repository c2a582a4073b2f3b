"""The keys of SGLang's pages: its own hashes, behind everything else that changes a page's bytes (K3, K4). Pure.

    {namespace}/sglang/{model}~{fingerprint}@{revision}/{shard}/{pool}/t{tokens}b{bytes}/{hash}

SGLang's hash covers the tokens from the beginning on, the LoRA adapter and the cache salt. The fingerprint covers how the host
pool lays a page out, as the pool describes itself, so that two servers share pages only if they agree on every byte.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from akv.plan.integrity import size_suffix
from akv.plan.keys import FINGERPRINT_DIGITS, escape, spelt
from akv.settings import Settings


class PageShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a page of a host pool looks like, in the pool's own words. Whatever differs here differs in the key."""

    #: The pool's name at SGLang: "kv", "mamba".
    pool: str
    #: Its class: classes may order equal dimensions in different ways.
    kind: str
    #: The order of its dimensions: "page_first".
    layout: str
    dtype: str
    #: Tokens, or states, in one page.
    tokens: int
    #: Bytes of each piece of a page, in the order in which the pool names them.
    pieces: tuple[int, ...]
    #: The order in which these pieces lie in memory: a pool that names them in another order is told apart.
    order: tuple[int, ...]
    #: What else the pool says of itself: layers, heads, the tag of its own page format.
    facts: tuple[tuple[str, str], ...] = ()
    #: Whether SGLang copies pages out itself ("flat"), or names the pieces where they lie ("pieces").
    access: str = "pieces"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(self.pieces)


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands among those that serve one model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    #: Context parallelism inside attention: each rank holds another slice of every page.
    cp_rank: int = 0
    cp_size: int = 1
    #: Whether every tensor-parallel rank holds the same bytes of the KV pool, as with MLA.
    replicated: bool = False

    @classmethod
    def of(cls, config: Any) -> "Ranks":
        """From SGLang's `HiCacheStorageConfig`."""
        return cls(
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            cp_rank=getattr(config, "attn_cp_rank", 0),
            cp_size=getattr(config, "attn_cp_size", 1),
            replicated=config.is_mla_model,
        )

    def shard(self, *, replicated: bool) -> str:
        """How the pages of this rank are named apart from those of others (K3): "w8r3", "replicated", "w8r3-p2r0"."""
        parts = ["replicated" if replicated else f"w{self.tp_size}r{self.tp_rank}"]
        parts += [f"p{self.pp_size}r{self.pp_rank}"] if self.pp_size > 1 else []
        parts += [f"c{self.cp_size}r{self.cp_rank}"] if self.cp_size > 1 else []
        return "-".join(parts)


class PageKeys:
    """The keys of one host pool's pages on one rank."""

    def __init__(self, settings: Settings, shape: PageShape, ranks: Ranks, *, replicated: bool) -> None:
        """`replicated`: every tensor-parallel rank holds the same bytes of this pool. Raises SettingsError as `spelt` does."""
        model = spelt("model_key", settings.model_key)
        if not settings.pin_model_key:
            fingerprint = blake2b(msgspec.msgpack.encode(shape), digest_size=16).hexdigest()
            model += "~" + fingerprint[:FINGERPRINT_DIGITS]
        if settings.revision:
            model += "@" + spelt("revision", settings.revision)
        size = f"t{shape.tokens}b{shape.page_bytes}" + size_suffix(settings.integrity, settings.integrity_secret.encode())
        space = f"{spelt('namespace', settings.namespace)}/sglang/{model}"
        #: What every key begins with, up to and including the "/" before the hash.
        self.prefix = f"{space}/{ranks.shard(replicated=replicated)}/{escape(shape.pool)}/{size}/"
        self._secret = settings.key_secret.encode()

    def of(self, hashes: Sequence[str]) -> list[str]:
        """The key of each page, in order. With `key_secret` a key says nothing of the hash to who does not know it (X2)."""
        if self._secret:
            return [self.prefix + blake2b(h.encode(), digest_size=32, key=self._secret).hexdigest() for h in hashes]
        return [self.prefix + escape(h) for h in hashes]
