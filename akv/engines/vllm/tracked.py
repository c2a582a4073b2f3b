"""What the adapter keeps of one request of vLLM's, in the engine's thread and on the connector's loop."""

from collections import deque
from concurrent.futures import Future
from typing import Any

from akv.engines.vllm.identity import Use
from akv.request import Request
from akv.values.offers import Offer


class Tracked:
    """One request. The engine's thread owns every field but the last two, which the loop owns, and the queue of tokens."""

    __slots__ = (
        "_news",
        "_sent",
        "asked",
        "asked_for",
        "below",
        "ended",
        "epoch",
        "held",
        "later",
        "local_only",
        "noted",
        "preemptions",
        "receiving",
        "reported",
        "request",
        "use",
        "vllm",
    )

    def __init__(self, vllm: Any, use: Use, epoch: str = "") -> None:
        #: vLLM's own, a `vllm.v1.request.Request`.
        self.vllm = vllm
        self.use = use
        #: The session's, when it came.
        self.epoch = epoch
        #: The lookup that was begun last, and for which local match, in tokens.
        self.asked: Future[Offer] | None = None
        self.asked_for = -1
        #: vLLM was told to ask again later.
        self.later = False
        #: Nothing is loaded for it any more.
        self.local_only = not use.reads
        #: vLLM waits for the end of a load; until it was told, and has read that.
        self.receiving = False
        #: It was told.
        self.reported = False
        #: The ranks were told of that load, in processes of their own, and each says itself that it ended there.
        self.below = False
        #: It ended, and vLLM keeps its blocks until it is told that nothing reads them.
        self.held = False
        #: The state of the last pass that akv was told of: whole blocks, those of confirmed tokens, blocks behind each window.
        self.noted: tuple[int, ...] = ()
        #: How often vLLM had preempted it when akv was told last.
        self.preemptions = 0
        #: Tokens that were sent, and those of them that the loop has not taken. A queue, because whatever was to take them may
        #: be cancelled before it began.
        self._sent = 0
        self._news: deque[list[int]] = deque()
        #: akv's own; None until the loop has opened it.
        self.request: Request | None = None
        #: Nothing more is asked of akv: it ended, maybe before it was opened, or cannot be named.
        self.ended = False

    @property
    def id(self) -> str:
        """As vLLM names it."""
        return str(self.vllm.request_id)

    def send(self) -> None:
        """In the engine's thread: what it has grown by is there for the loop to take."""
        if tokens := self.vllm.all_token_ids[self._sent :]:
            self._sent += len(tokens)
            self._news.append(tokens)

    def take(self) -> list[int]:
        """On the loop: its tokens that were sent and not taken."""
        tokens: list[int] = []
        while self._news:
            tokens += self._news.popleft()
        return tokens
