"""Takes requests in: what their pages are called, and whether they may use the pool at all (K1, K5, L7, X3)."""

from akv import observe
from akv.errors import EngineContractError
from akv.ownership.request_record import RequestRecord
from akv.ownership.requests import Requests
from akv.plan.identity import Hashing
from akv.plan.recent_chains import RecentChains
from akv.plan.tokens import Tokens
from akv.values.offers import LookupOutcome
from akv.values.scope import Scope


class Door:
    """Opens the requests of one server."""

    def __init__(self, requests: Requests, hashing: Hashing, recent: RecentChains, *, require_salt: bool) -> None:
        self._requests = requests
        self._hashing = hashing
        self._recent = recent
        self._require_salt = require_salt
        self._warned = False

    def open(self, request_id: str, tokens: Tokens, scope: Scope, *, reads_cache: bool, dummy: bool) -> RequestRecord:
        """A request begins with its prompt's tokens.

        Raises TokenError, EngineContractError, and SettingsError for a scope that this server's keys have no place for; then
        nothing was opened.
        """
        if not isinstance(request_id, str):
            raise EngineContractError(
                # Not quoted: where arguments were exchanged this is the prompt (X6).
                f"a request's id is a str, not a {type(request_id).__name__}: it travels in messages and stands in events"
            )
        chain = self._hashing.chain(scope, tokens)
        excluded = LookupOutcome.NOT_READING if dummy else self._excluded(scope)
        if excluded is None:
            self._recent.adopt(chain)
        record = self._requests.open(request_id, chain, reads_cache=reads_cache)
        record.dummy, record.excluded = dummy, excluded
        if excluded is not None and not dummy:
            self._tell(record, excluded)
        return record

    def _excluded(self, scope: Scope) -> LookupOutcome | None:
        """Why a request of this scope neither reads nor writes; None if it may."""
        if scope.media is None:
            return LookupOutcome.MEDIA_UNKNOWN
        return LookupOutcome.UNSALTED if self._require_salt and not scope.salt else None

    def _tell(self, record: RequestRecord, reason: LookupOutcome) -> None:
        who = record.request_id, record.incarnation
        observe.emit(observe.REQUEST_EXCLUDED, request_id=who[0], incarnation=who[1], reason=reason.value)
        if reason is LookupOutcome.MEDIA_UNKNOWN and not self._warned:
            self._warned = True
            observe.emit(observe.MEDIA_UNKNOWN, request_id=who[0], incarnation=who[1])
