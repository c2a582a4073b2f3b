"""The names of pages in the pool (K3, K4).

Two servers share a page exactly if they spell its key alike, so whatever changes a page's bytes stands in the key, and every
part is escaped: no name of a model can look like two parts.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from akv.errors import SettingsError
from akv.plan.integrity import size_suffix
from akv.values.layout import Layout
from akv.values.settings import Settings

#: Hex digits of the layout fingerprint in a key: 64 bits, enough to tell the layouts of one model apart (K4).
FINGERPRINT_DIGITS = 16
#: The key formats there are. "trtllm" spells keys, and hashes, as TensorRT-LLM's own servers do (K1).
KEY_FORMATS = ("akv", "trtllm")
#: What separates the parts of a key. Where nothing is escaped no part may hold one of them.
SEPARATORS = "/~@"
# The one alphabet of K4; "%" comes in by escaping, and the separators "/", "~" and "@" never do.
_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]")


def escape(text: str) -> str:
    """Percent-encode, with upper-case hex, every UTF-8 byte outside [A-Za-z0-9._-] (K4).

    `urllib.parse.quote` is not used because it leaves "~" alone, which separates the fingerprint here. Distinct texts have
    distinct images. Raises UnicodeEncodeError for a lone surrogate.
    """
    return _UNSAFE.sub(lambda unsafe: b"%%%02X" % ord(unsafe[0]), text.encode()).decode("ascii")


def layout_fingerprint(layout: Layout) -> str:
    """32 hex digits that differ whenever the bytes of some page would differ: blake2b over the layout's msgpack (K4).

    msgpack writes a struct's fields by name in their declared order, so renaming or moving a field of the layout renames every
    key: a new key space, never wrong bytes under an old one.
    """
    return blake2b(msgspec.msgpack.encode(layout), digest_size=16).hexdigest()


def model_part(model_key: str, layout: Layout, *, pin: bool, revision: str, key_format: str = "akv") -> str:
    """The part of a key that names the weights and the geometry: `esc(model_key)~fingerprint@esc(revision)` (K4).

    `pin` leaves the fingerprint out: then the operator vouches that all who use this key have equal layouts. The revision
    stands there, pinned or not, if one was set.

    Raises SettingsError (fault of whoever wrote the settings) for an blank model key, for text that is not Unicode, and with
    `key_format = "trtllm"`, which escapes nothing, for text that holds a separator.
    """
    part = spelt("model_key", model_key, key_format)
    if not pin:
        part += "~" + layout_fingerprint(layout)[:FINGERPRINT_DIGITS]
    if revision:
        part += "@" + spelt("revision", revision, key_format)
    return part


#: What to write instead of a part that cannot stand in a key.
_FIXES = {
    "namespace": "Leave it out to use akv's own, 'akv1'.",
    "model_key": "Name the weights, 'meta-llama/Llama-3.1-8B-Instruct' say; a path is no name.",
    "revision": "Name the revision of the weights, or leave it out.",
}


def spelt(field: str, text: str, key_format: str = "akv") -> str:
    """How a part of a key is written: `field` is "namespace", "model_key" or "revision". Raises as `model_part` does."""
    if not isinstance(text, str):
        raise SettingsError(field, text, f"it is a {type(text).__name__}, not a str", _FIXES[field])
    if not text.strip():
        raise SettingsError(field, text, "it is part of every page's key and must not be empty", _FIXES[field])
    try:
        escaped = escape(text)
    except UnicodeEncodeError:
        raise SettingsError(field, text, "it is not valid Unicode (a lone surrogate)", _FIXES[field]) from None
    if key_format == "akv":
        return escaped
    if any(separator in text for separator in SEPARATORS):
        raise SettingsError(
            field,
            text,
            f"with key_format {key_format!r} nothing is escaped, and {', '.join(SEPARATORS)} separate the parts of a key",
            "Use the name that its servers use, without them.",
        )
    return text


class Shard(msgspec.Struct, frozen=True):
    """A rank's part of the pages of a layer group. Ranks whose pages have equal bytes have equal shards (K3)."""

    #: How it is spelt in a key.
    name: str
    #: Whether this rank writes it. Of the ranks that hold a shard exactly one does.
    writes: bool


def shard_of(layout: Layout, group: int, rank: int) -> Shard:
    """Which shard of a layer group a rank holds, and whether it writes it (K3).

    Heads are spread over the ranks as every engine does it: in order, each rank an equal share of them, or each head on
    `world / kv_heads` neighbouring ranks. So there are `min(world, kv_heads)` distinct shards. `check_layout` has made sure
    that the division is even.

    Raises ValueError for a rank outside the layout's world (fault of whoever wires the ranks).
    """
    world = layout.world
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of a layout of {world} ranks")
    distinct = min(world, layout.groups[group].kv_heads)
    holders = world // distinct
    if distinct == 1 < world:
        return Shard("replicated", rank == 0)
    return Shard(f"w{distinct}r{rank // holders}", rank % holders == 0)


class KeySpace:
    """The keys that one rank of one server uses. Built once: only the hashes differ from key to key."""

    __slots__ = ("_eviction_prefix", "_prefixes", "_shards", "space")

    def __init__(self, space: str, prefixes: tuple[str, ...], shards: tuple[Shard, ...], eviction_prefix: str) -> None:
        """Use `KeySpace.of`."""
        #: What every key of this server begins with, the shard and what follows left out: `{namespace}/{model part}`.
        self.space = space
        self._prefixes = prefixes
        self._shards = shards
        self._eviction_prefix = eviction_prefix

    @classmethod
    def of(
        cls,
        layout: Layout,
        namespace: str,
        model_key: str,
        revision: str = "",
        pin_model_key: bool = False,
        rank: int = 0,
        *,
        key_format: str = "akv",
        trailer: str = "",
    ) -> "KeySpace":
        """Spell what the keys of `rank` share. Raises SettingsError as `model_part` does, and for an empty namespace.

        `trailer` tells apart pages with something behind them: what `akv.plan.integrity.size_suffix` says (S11).
        """
        namespace = spelt("namespace", namespace, key_format)
        model = model_part(model_key, layout, pin=pin_model_key, revision=revision, key_format=key_format)
        space = f"{namespace}/{model}"
        shards = tuple(shard_of(layout, group, rank) for group in range(len(layout.groups)))
        prefixes = tuple(
            f"{space}/{shard.name}/lg{index}/t{layout.tokens_per_block}b{group.bytes_per_page}{trailer}/"
            for index, (group, shard) in enumerate(zip(layout.groups, shards, strict=True))
        )
        return cls(space, prefixes, shards, f"{space}/w{layout.world}/")

    @classmethod
    def of_settings(cls, settings: Settings, layout: Layout, *, revision: str | None = None, rank: int = 0) -> "KeySpace":
        """The keys of a server with these settings. `revision`: of the weights that it runs since a reset (K8)."""
        return cls.of(
            layout,
            settings.namespace,
            settings.model_key,
            settings.revision if revision is None else revision,
            settings.pin_model_key,
            rank,
            key_format=settings.key_format,
            trailer=size_suffix(settings.integrity, settings.integrity_secret.encode()),
        )

    def prefix(self, group: int) -> str:
        """What all keys of a layer group begin with, up to and including the "/" before the hash."""
        return self._prefixes[group]

    def keys(self, group: int, hashes: Sequence[bytes]) -> list[str]:
        """The keys of a layer group's pages, one per hash, in order (K7: a column, about 0.1 us for each)."""
        prefix = self._prefixes[group]
        return [prefix + block.hex() for block in hashes]

    def writes(self, group: int) -> bool:
        """Whether this rank stores the group's pages. Where several ranks hold equal bytes, one of them does."""
        return self._shards[group].writes

    def eviction_group(self, block_hash: bytes) -> str:
        """The name that all pages of one block share, over groups and shards, so that they leave the pool together (S10)."""
        return self._eviction_prefix + block_hash.hex()


class ServerKeys:
    """The keys that a server asks for: of each page those of every distinct shard, since a page lacks what one of them lacks
    (L2). Of a server with one rank they are that rank's.
    """

    __slots__ = ("_prefixes", "space")

    def __init__(self, space: str, prefixes: tuple[tuple[str, ...], ...]) -> None:
        """Use `ServerKeys.of_settings`."""
        #: As `KeySpace.space`.
        self.space = space
        #: For each layer group, what the keys of each distinct shard begin with.
        self._prefixes = prefixes

    @classmethod
    def of_settings(cls, settings: Settings, layout: Layout, *, revision: str | None = None) -> "ServerKeys":
        """As `KeySpace.of_settings`, of all ranks."""
        ranks = [KeySpace.of_settings(settings, layout, revision=revision, rank=rank) for rank in range(layout.world)]
        groups = range(len(layout.groups))
        # Ranks whose bytes are equal have equal prefixes, and are asked about once.
        return cls(ranks[0].space, tuple(tuple(dict.fromkeys(rank.prefix(group) for rank in ranks)) for group in groups))

    def shards(self, group: int) -> int:
        """How many keys a page of this group has."""
        return len(self._prefixes[group])

    def keys(self, group: int, hashes: Sequence[bytes]) -> list[str]:
        """The keys of a layer group's pages: `shards(group)` for each hash, in order, those of one page behind each other."""
        prefixes = self._prefixes[group]
        if len(prefixes) == 1:
            (prefix,) = prefixes
            return [prefix + block.hex() for block in hashes]
        return [prefix + name for name in map(bytes.hex, hashes) for prefix in prefixes]
