"""What the chains of one server begin on: everything that separates equal token sequences from each other (K1, K2, K5, X2)."""

from akv.errors import SettingsError, TokenError
from akv.plan.hashing import Chain, hash_state, scope_seed
from akv.plan.media import check_inside, check_media, media_frames
from akv.plan.tokens import Tokens
from akv.values.hidden import HidesSecrets
from akv.values.scope import Lora, Media, Scope


class Hashing(HidesSecrets, frozen=True):
    """How one server hashes. Servers share pages only if all of it agrees."""

    SECRETS = frozenset({"secret"})

    #: T.
    tokens_per_block: int
    #: L: prompt tokens behind a block that its KV depends on (K2). 0 without a drafter whose KV does.
    lookahead: int = 0
    #: "akv", or "trtllm" for hashes that are TensorRT-LLM's own.
    key_format: str = "akv"
    #: Keys every hash; empty for none (X2).
    secret: bytes = b""

    @property
    def slice_blocks(self) -> int:
        """As `Chain.slice_blocks`, of any chain."""
        return Chain(b"", self.tokens_per_block, lookahead=self.lookahead).slice_blocks

    def seed(self, scope: Scope) -> bytes:
        """What the first block of every chain of this scope is hashed onto, 16 bytes: scopes share no hash.

        Raises TokenError (fault of the caller of this request) for a scope that cannot be hashed, whose salt is not quoted;
        SettingsError for an adapter's revision under `key_format = "trtllm"`, whose hashes have no place for one.
        """
        media = _media_of(scope)
        return self._seed(scope, media if self.key_format == "trtllm" else ())

    def chain(self, scope: Scope, tokens: Tokens) -> Chain:
        """The chain of a prompt. All or nothing.

        Raises as `seed` does, and TokenError for tokens that cannot be hashed and for media that are not inside them.

        Of a scope whose media nobody has digested the chain is that of the text alone: do not use its hashes (K5).
        """
        media = _media_of(scope)
        in_seed = self.key_format == "trtllm"
        chain = Chain(
            self._seed(scope, media if in_seed else ()),
            self.tokens_per_block,
            lookahead=self.lookahead,
            media={} if in_seed else media_frames(media, self.tokens_per_block, self.lookahead),
            fresh=hash_state(self.secret) if self.secret else None,
        )
        chain.append(tokens)
        check_inside(media, chain.length)
        return chain

    def _seed(self, scope: Scope, media: tuple[Media, ...]) -> bytes:
        if self.key_format == "trtllm" and isinstance(scope.lora, Lora) and scope.lora.revision:
            raise SettingsError(
                "key_format",
                self.key_format,
                "a request's LoRA adapter has a revision, and these hashes have no place for one",
                "Give changed weights of an adapter another id, or use key_format 'akv'.",
            )
        return scope_seed(scope, media=media, lookahead=self.lookahead, fresh=hash_state(self.secret))


def _media_of(scope: Scope) -> tuple[Media, ...]:
    if not isinstance(scope, Scope):
        raise TokenError(f"the scope of a request is an akv.Scope, not a {type(scope).__name__}; nothing was opened")
    return () if scope.media is None else check_media(scope.media)
