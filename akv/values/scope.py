"""Who may share a prefix with whom."""

import msgspec

from akv.values.hidden import HidesSecrets

#: Bytes of a media digest (K1).
DIGEST_BYTES = 32


class Lora(msgspec.Struct, frozen=True):
    """An adapter that changes what the model computes (K1)."""

    #: A signed 64-bit number. It means the same adapter in every server of the pool.
    id: int
    #: The revision of the adapter's weights: new weights under one id then share nothing with old ones. Empty if the id says
    #: it all.
    revision: str = ""


class Media(HidesSecrets, frozen=True, kw_only=True):
    """An image, a clip or a recording of a prompt, whose tokens are placeholders that look alike for all of them (K1)."""

    #: Whoever reads a log could confirm a guessed picture.
    SECRETS = frozenset({"digest"})

    #: 32 bytes that name the content: two contents never have one digest. Of the content as the model is given it, so that a
    #: picture in another resolution is another.
    digest: bytes
    #: Position of its first token in the sequence, from 0.
    position: int
    #: Tokens that it takes, at least one.
    tokens: int


class Scope(HidesSecrets, frozen=True, kw_only=True):
    """What separates equal token sequences from each other. Two requests share pages only if their scopes agree (K1)."""

    SECRETS = frozenset({"salt"})

    #: A random secret per tenant, UTF-8; None and "" are the same scope (K5). Never logged, and in no `repr`.
    salt: str | None = None
    #: The adapter that computes the request; None for the model alone.
    lora: Lora | None = None
    #: The media of the prompt, by position, none overlapping another. Each counts from the block in which it begins to matter,
    #: so what lies before it is shared. None says that there are media and nobody knows their digests: such a request neither
    #: reads nor writes (K5), since its placeholders would match any other picture's.
    media: tuple[Media, ...] | None = ()

    def __post_init__(self) -> None:
        """One spelling for each identity, so that equal scopes are equal values: caches of chains are partitioned by them."""
        if self.salt == "":
            msgspec.structs.force_setattr(self, "salt", None)
        media: object = self.media
        if isinstance(media, list):
            msgspec.structs.force_setattr(self, "media", tuple(media))


#: The scope of a server with one tenant.
EMPTY_SCOPE = Scope()
