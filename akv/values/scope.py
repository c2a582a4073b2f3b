"""Who may share a prefix with whom."""

import msgspec


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What separates equal token sequences from each other. Two requests share pages only if their scopes are equal (K1)."""

    #: A random secret per tenant, UTF-8; None and "" are the same scope (K5). Never logged.
    salt: str | None = None


#: The scope of a server with one tenant.
EMPTY_SCOPE = Scope()
