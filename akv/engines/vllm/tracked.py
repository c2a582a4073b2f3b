"""What the adapter keeps of one request of vLLM's, in the engine's thread and on the connector's loop."""

from concurrent.futures import Future
from typing import Any

from akv.engines.vllm.identity import Use
from akv.request import Request
from akv.values.offers import Offer


class Tracked:
    """One request. The engine's thread owns every field but the last three, which the loop owns."""

    __slots__ = (
        "asked",
        "asked_for",
        "ended",
        "held",
        "local_only",
        "noted",
        "preemptions",
        "receiving",
        "reported",
        "request",
        "sent",
        "use",
        "vllm",
    )

    def __init__(self, vllm: Any, use: Use) -> None:
        #: vLLM's own, a `vllm.v1.request.Request`.
        self.vllm = vllm
        self.use = use
        #: The lookup that was begun last, and for which local match, in tokens.
        self.asked: Future[Offer] | None = None
        self.asked_for = -1
        #: Nothing is loaded for it any more.
        self.local_only = not use.reads
        #: vLLM waits for the end of a load; until it was told, and has read that.
        self.receiving = False
        #: It was told.
        self.reported = False
        #: It ended, and vLLM keeps its blocks until it is told that nothing reads them.
        self.held = False
        #: The state of the last pass that akv was told of: whole blocks, and blocks behind each window.
        self.noted: tuple[int, ...] = ()
        #: How often vLLM had preempted it when akv was told last.
        self.preemptions = 0
        #: Tokens that the loop has, or that are on their way to it.
        self.sent = 0
        #: akv's own; None until the loop has opened it.
        self.request: Request | None = None
        #: It ended, maybe before it was opened.
        self.ended = False

    @property
    def id(self) -> str:
        """As vLLM names it."""
        return str(self.vllm.request_id)

    def news(self) -> list[int]:
        """Its tokens that the loop does not have. They count as sent."""
        tokens: list[int] = self.vllm.all_token_ids[self.sent :]
        self.sent += len(tokens)
        return tokens
