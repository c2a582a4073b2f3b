"""What the bridge and the adapters of engines say."""

from akv.catalogue.entry import event as _event

BRIDGE_UNCLOSED = _event(
    "akv.bridge.unclosed",
    "warning",
    "waited_s",
    "The connector of an engine with synchronous hooks did not close in time; its thread goes on, and the exit guard sees to "
    "the end of the process. As a rule a store call does not return.",
)
ENGINE_RECOMPUTES = _event(
    "akv.engine.recomputes",
    "info",
    "",
    "An engine's policy for loads that fail was to fail their requests, and is now to compute them: what a cache does not "
    "deliver must not be an error to a client.",
)
ENGINE_LOAD_REFUSED = _event(
    "akv.engine.load_refused",
    "warning",
    "request_id",
    "An engine's local match, or its blocks for an offer, were not taken; the request is computed. Seen often, it is a fault "
    "of the adapter: report it with the exception that the event carries.",
)
ENGINE_PASS_UNSAVED = _event(
    "akv.engine.pass_unsaved",
    "warning",
    "",
    "What an engine said of a pass, or of a request's end, was refused, or the device failed: nothing of it is saved. Seen "
    "often, it is a fault of the adapter: report it with the exception that the event carries.",
)
ENGINE_REQUEST_EXCLUDED = _event(
    "akv.engine.request_excluded",
    "warning",
    "request_id",
    "A request is neither looked up nor saved any more, since akv cannot name its tokens or its scope, as the exception says.",
)
ENGINE_WITHOUT_CACHE = _event(
    "akv.engine.without_cache",
    "error",
    "",
    "The connector of an engine has ended, as the exception says; the engine goes on without a cache until it is restarted.",
)
ENGINE_RESET = _event(
    "akv.engine.reset",
    "warning",
    "",
    "An engine was asked to empty the pool with its own cache, as before it sleeps or gets new weights. Other servers read "
    "the pool, so it keeps what it has; this server finds nothing of before and, as nobody says which weights it has now, "
    "shares with no other one until it is restarted: with another `revision` if they changed.",
)
SGLANG_POOL = _event(
    "akv.sglang.pool",
    "info",
    "pool key_space layout page_bytes pieces",
    "SGLang registered a host pool. Two servers share its pages if their `key_space` is the same. A page of many `pieces` is "
    "copied more slowly than one of two: see `layout`.",
)
SGLANG_PREFETCHED = _event(
    "akv.sglang.prefetched",
    "debug",
    "pool pages moved bytes duration_s",
    "SGLang asked for `pages` pages, and `moved` of them are in its host pool. It takes those before the first that is not.",
)
SGLANG_BACKED_UP = _event(
    "akv.sglang.backed_up",
    "debug",
    "pool pages moved bytes duration_s",
    "SGLang handed over `pages` pages, and `moved` of them are in the pool, whoever stored them.",
)
SGLANG_CLEARED = _event(
    "akv.sglang.cleared",
    "info",
    "pool pages state",
    "SGLang was told to clear its storage: `pages` pages of this rank and host pool were removed from the pool, no others.",
)
LOOKUP_LATE = _event(
    "akv.lookup.late",
    "info",
    "request_id grace_s",
    "An engine that asks once, and wants its answer at once, waited `grace_s` for a lookup in vain: the request computes. "
    "Raise `lookup_grace_ms` if that is often.",
)
LOADS_FATAL = _event(
    "akv.engine.loads_fatal",
    "warning",
    "engine windows",
    "With these classes of the engine's adapter no request can be started anew whose load failed: a page that was evicted "
    "between the answer and the load ends the server. `windows`: the model has sliding windows, and needs them all the same.",
)
