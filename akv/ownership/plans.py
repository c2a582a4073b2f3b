"""Plans of passes: each ends exactly once (S2)."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from akv.errors import EngineContractError

Content = TypeVar("Content")


class UnknownPlan(EngineContractError):
    """A plan that this connector never made. At fault: the adapter, and more than one request may be concerned (L6)."""


class Plans(Generic[Content]):
    """The plans that have been made and not ended, oldest first, each with what its maker wants back at its end."""

    def __init__(self) -> None:
        self._last_id = 0
        self._open: dict[int, Content] = {}

    @property
    def open(self) -> int:
        """Plans that have not ended."""
        return len(self._open)

    @property
    def contents(self) -> Iterable[Content]:
        """What the open plans keep, oldest first."""
        return self._open.values()

    def peek(self, plan_id: int) -> Content | None:
        """What stands with a plan that has not ended; None if it has, or never was."""
        return self._open.get(plan_id)

    def next_id(self) -> int:
        """The id of the plan that `add` will take next."""
        return self._last_id + 1

    def add(self, content: Content) -> int:
        """A plan was made."""
        self._last_id += 1
        self._open[self._last_id] = content
        return self._last_id

    def end(self, plan_id: int) -> tuple[Content, dict[int, Content]]:
        """End a plan. Plans made before it end with it, since their passes can no longer come: they are the second value.

        Raises UnknownPlan for an id that was never given out, EngineContractError for a plan that has ended.
        """
        if not 1 <= plan_id <= self._last_id:
            raise UnknownPlan(
                f"pass plan {plan_id} was never made by this connector (the newest is {self._last_id}): the engine reports "
                "passes of another connector, or mixes up ids; pass on the object that plan_pass() returned"
            )
        if plan_id not in self._open:
            raise EngineContractError(
                f"pass plan {plan_id} has ended already: a plan ends once, by after_forward(), by drop_pass(), or with the "
                "end of a later plan; call exactly one of them per plan, in the order of the passes"
            )
        earlier = {made: self._open.pop(made) for made in list(self._open) if made < plan_id}
        return self._open.pop(plan_id), earlier
