"""The key space that settings lead to, part by part, and why two servers share pages or not. Needs none of the extra `cli`."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from akv.plan.integrity import size_suffix
from akv.plan.keys import spelt
from akv.values.settings import Settings

#: Names of a machine for itself.
_OWN_NAMES = {"localhost": "127.0.0.1", "[::1]": "[::1]", "::1": "[::1]"}
#: What stands in a key for the digits that only a layout gives.
FINGERPRINT = "<layout>"


class KeyPart(NamedTuple):
    """A piece of every page's key."""

    name: str
    #: As it is written; what stands in <> is not decided by settings.
    spelt: str
    #: The settings, and what else, that decide it.
    decided_by: tuple[str, ...]
    meaning: str


class Comparison(msgspec.Struct, frozen=True):
    """Whether two servers share pages."""

    share: bool
    #: Why not; empty if they share.
    reasons: tuple[str, ...]
    #: What has to hold besides, which settings do not decide, and what is shared in part.
    conditions: tuple[str, ...]


def key_parts(settings: Settings) -> tuple[KeyPart, ...]:
    """The pieces of a page's key, in order; joined they are the key. Secrets are named and not shown (X6)."""
    kind = settings.key_format
    trailer = size_suffix(settings.integrity, settings.integrity_secret.encode())
    pinned = settings.pin_model_key
    return (
        KeyPart("namespace", f"{spelt('namespace', settings.namespace, kind)}/", ("namespace",), "separates deployments"),
        KeyPart("model", spelt("model_key", settings.model_key, kind), ("model_key",), "names the weights"),
        KeyPart(
            "layout",
            "" if pinned else f"~{FINGERPRINT}",
            ("pin_model_key", "the engine's layout"),
            "left out: you vouch that layouts are equal" if pinned else "16 digits of the layout's fingerprint",
        ),
        KeyPart(
            "revision",
            f"@{spelt('revision', settings.revision, kind)}" if settings.revision else "",
            ("revision", "reset()"),
            "names the revision of the weights",
        ),
        KeyPart("shard", "/<shard>/", ("the engine's layout",), "which heads of the model the rank holds"),
        KeyPart("group", "lg<group>/", ("the engine's layout",), "the index of the layer group"),
        KeyPart(
            "size",
            f"t<tokens>b<bytes>{trailer}/",
            ("the engine's layout", "integrity", "integrity_secret"),
            "tokens of a block, bytes of a page" + ("" if not trailer else f", and what is behind it: {settings.integrity}"),
        ),
        KeyPart(
            "hash",
            "<hash>",
            ("key_format", "key_secret", "the engine's drafter", "the request"),
            f"of the tokens, salt, adapter and media, {'keyed by a secret' if settings.key_secret else 'without a key'}, "
            f"spelt as by {kind}",
        ),
    )


def compare(one: Settings, other: Settings) -> Comparison:
    """Whether a server with the settings `one` and one with `other`, called A and B, share pages."""
    reasons = (*_different_pools(one, other), *_different_keys(one, other), *_idle_roles(one, other))
    return Comparison(not reasons, reasons, tuple(_conditions(one, other)))


def _different_pools(one: Settings, other: Settings) -> Iterator[str]:
    for name, settings in (("A", one), ("B", other)):
        if settings.pool == "embedded":
            yield f"pool: that of {name} is embedded: it begins and ends with its process, and nobody else is meant to join it"
    addresses = one.store.master_address, other.store.master_address
    if "embedded" not in (one.pool, other.pool) and _plain_address(addresses[0]) != _plain_address(addresses[1]):
        yield f"store.master_address: A joins the pool at {addresses[0]}, B the one at {addresses[1]}"


def _plain_address(address: str) -> str:
    """One spelling for each of the names that every machine has for itself; other names mean what a resolver makes of them."""
    host, _, port = address.lower().rpartition(":")
    return f"{_OWN_NAMES.get(host, host)}:{port}"


def _is_own(host: str) -> bool:
    """Whether this name, without a port, means another machine on each machine."""
    return _OWN_NAMES.get(host.lower(), host) in _OWN_NAMES.values() or host.startswith("127.")


def _different_keys(one: Settings, other: Settings) -> Iterator[str]:
    for mine, theirs in zip(key_parts(one), key_parts(other), strict=True):
        if mine.spelt != theirs.spelt:
            setting = "integrity" if mine.name == "size" else mine.decided_by[0]
            said = [part.spelt.strip("/") or "nothing" for part in (mine, theirs)]
            yield f"{setting}: keys of A have {said[0]} where those of B have {said[1]}"
    if one.key_secret != other.key_secret:
        yield f"key_secret: {_secrets(one.key_secret, other.key_secret)}, so no hash of one is a hash of the other"


def _secrets(one: str, other: str) -> str:
    if one and other:
        return "A and B have different ones"
    return f"{'A' if one else 'B'} has one, {'B' if one else 'A'} has none"


def _idle_roles(one: Settings, other: Settings) -> Iterator[str]:
    if one.role == other.role and one.role != "both":
        what = "both save and neither loads" if one.role == "producer" else "both load and neither saves"
        yield f"role: {what}"


def _conditions(one: Settings, other: Settings) -> Iterator[str]:
    if one.pin_model_key and other.pin_model_key:
        yield "Layouts have to be equal, and nothing compares them: pin_model_key is set in both."
    else:
        yield "The engines' layouts have to be equal: tokens per block, layer groups, types, regions and their order."
    yield "The engines' drafters have to look ahead equally far, and requests to agree in salt, adapter and media."
    yield "Drafters whose KV is stored have to be the same: model_key and revision alone tell their weights apart."
    yield from _reach(one, other)
    if one.key_format != other.key_format:
        yield "key_format: prompts with media are not shared, they are hashed in two ways; those of text alone are."
    for name, settings in (("A", one), ("B", other)):
        if settings.require_salt:
            yield f"require_salt: requests without a salt are neither read nor saved by {name}."
    if one.role != other.role:
        for name, peer, settings in (("A", "B", one), ("B", "A", other)):
            if settings.role != "both":
                what = f"saves, and reads nothing of {peer}'s" if settings.role == "producer" else f"reads what {peer} saves"
                yield f"role: {name} only {what}."


def _reach(one: Settings, other: Settings) -> Iterator[str]:
    """What keeps a page that is there from being read, or from being stored at all."""
    if _is_own(one.store.master_address.rpartition(":")[0]):
        yield f"store.master_address: {one.store.master_address} is another pool on each machine: A and B have to run on one."
    else:
        for name, settings in (("A", one), ("B", other)):
            if settings.store.segment_bytes and _is_own(settings.store.local_hostname):
                yield (
                    f"store.local_hostname: other machines do not reach what {name} holds under "
                    f"{settings.store.local_hostname}: A and B have to run on one."
                )
    for field in ("protocol", "metadata_server"):
        mine, theirs = getattr(one.store, field), getattr(other.store, field)
        if mine != theirs:
            yield f"store.{field}: A uses {mine} and B {theirs}; pages may be out of reach."
    if not one.store.segment_bytes and not other.store.segment_bytes:
        yield "store.segment_bytes: neither lends memory to the pool, so somebody else has to."
