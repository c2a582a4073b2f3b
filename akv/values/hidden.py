"""Structs that hold secrets and are printed without them."""

from typing import Any, ClassVar

import msgspec

#: What is shown where a value must not be (X6).
HIDDEN = "(hidden)"


class HidesSecrets(msgspec.Struct, frozen=True):
    """A struct that prints, in `repr()` and in rich's tables and tracebacks, whether a secret is set and not what it is (X6).

    Structs end up in logs, in assertions and in the locals of tracebacks.
    """

    #: The fields that are secrets. Not annotated where it is overridden: it is no field.
    SECRETS: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        """As msgspec spells a struct, secrets hidden."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich prints: each field with its value."""
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, _SET if value and name in self.SECRETS else value) for name, value in fields]


class _Set:
    """Stands for a secret that is set."""

    def __repr__(self) -> str:
        return HIDDEN


_SET = _Set()
