"""What the connector, its pool and its device say. All of akv but for the adapters of engines."""

from akv.catalogue.entry import event as _event

CONNECTOR_OPEN = _event(
    "akv.connector.open",
    "info",
    "pool role layout key_space groups loaders savers phase outcome duration_s",
    "A connector opens. Its outcome says whether it did.",
)
CONNECTOR_CLOSE = _event(
    "akv.connector.close",
    "info",
    "requests outstanding_calls phase outcome duration_s",
    "A connector closes; `requests` were still open, `outstanding_calls` of the store did not return.",
)
CONNECTOR_RESET = _event(
    "akv.connector.reset",
    "info",
    "key_space requests",
    "The weights changed. Keys begin with `key_space` from here on; `requests` were open and are cancelled.",
)
CONNECTOR_BROKEN = _event(
    "akv.connector.broken",
    "error",
    "reason",
    "The connector stopped because of a fault that it cannot repair; every later call raises ConnectorBroken. "
    "Report it with the exception that the event carries.",
)
CONNECTOR_DEGRADED = _event(
    "akv.connector.degraded",
    "error",
    "reason",
    'A service of the connector failed, or an engine misreported a pass, and `on_failure` is "degrade": from now on lookups '
    "offer nothing, loads fail and nothing is saved; the program goes on. Report it with the exception that it carries. "
    "A connector that is opened anew, or a restart of the process, brings the cache back.",
)
RANK_DEGRADED = _event(
    "akv.rank.degraded",
    "error",
    "rank reason",
    "The worker half of rank `rank` serves no more, for `reason`: from now on this server goes on without a cache, as with "
    "`akv.connector.degraded`, since a block without one rank's page is of no use.",
)
CONNECTOR_UNCLEAN_EXIT = _event(
    "akv.connector.unclean_exit",
    "warning",
    "outstanding_calls buffers deadline_s",
    "Store calls did not return within the shutdown deadline. What they touch is kept to the end of the process, "
    "and the store is not closed.",
)
POOL_OPEN = _event(
    "akv.pool.open",
    "info",
    "pool master_address protocol segment_bytes segment_memory client_version data_path phase outcome duration_s",
    'This process joins a pool. `data_path` is "proved" after a small value went there and back, and "no_room" if the pool '
    "had no memory for one: nobody lends any yet, or it is full. `segment_memory` is what it lends: "
    '"private" also where "auto" found no room for more.',
)
POOL_SHARED = _event(
    "akv.pool.shared",
    "info",
    "pool master_address segment_bytes",
    "One more connector of this event loop uses the store's client that is open, since their store settings are equal. What "
    "they lend is lent once; the last of them closes it.",
)
POOL_CLOSE = _event(
    "akv.pool.close",
    "info",
    "pool phase outcome duration_s",
    "This process leaves the pool. The store's client holds the interpreter lock meanwhile.",
)
POOL_EMBEDDED_START = _event(
    "akv.pool.embedded.start",
    "info",
    "pid master_address phase outcome duration_s",
    "A master of our own starts as a child process, on loopback.",
)
POOL_EMBEDDED_EXIT = _event(
    "akv.pool.embedded.exit",
    "info",
    "pid status expected",
    "The embedded master ended. `expected` is false if nobody asked it to: the pool is gone, and lookups miss from then on.",
)
POOL_CALL_FAILED = _event(
    "akv.pool.call_failed",
    "warning",
    "call state code calls keys failed duration_s",
    "Store calls answered trouble for `failed` of their `keys`; `state` and `code` are those of each call's first trouble. "
    "The first call of a kind is reported at once, later ones are counted in `calls` and reported every 10 seconds, with the "
    "longest duration. A missing key is no trouble and is not reported here.",
)
POOL_CLIENT_LOG = _event(
    "akv.pool.client_log",
    "info",
    "severity source lines text",
    "The store's client logged `lines` lines at one place of its source, `text` being the first of them with keys left out. "
    "What lets it log them, and whether they come here, is said by `client.log_level` and `client.capture_log`.",
)
POOL_CLIENT_LINE = _event(
    "akv.pool.client_line",
    "debug",
    "severity source text",
    "One line of the store's client as it is. Apart from akv.pool.client_log because page keys are logged at debug level "
    "only.",
)
PAGES_LOST = _event(
    "akv.pages.lost",
    "error",
    "request_id incarnation pages",
    "The connector has degraded, and nobody can see whether a copy still touches these pages. They must not be used again "
    "while the process lives; the request was told by PagesLost.",
)
BREAKER_OPEN = _event(
    "akv.breaker.open",
    "warning",
    "reason",
    "The pool is not asked any more: lookups miss at once, saves are refused, queued loads fail. One probe at a time waits "
    "for it. "
    '`reason`: "unavailable", a call could reach it for no key; "timeouts", two deadlines passed while calls were under way; '
    '"quarantine", calls that were given up, and peers after transfers that failed, hold more than `quarantine_max_bytes`.',
)
BREAKER_CLOSED = _event(
    "akv.breaker.closed",
    "info",
    "reason probes duration_s",
    "The pool answered a probe, the last of `probes`, and is asked again. It had been out of use for `duration_s` seconds. It "
    "may have lost what it held, so everything is saved anew.",
)
LOOKUP_COMPLETE = _event(
    "akv.lookup.complete",
    "debug",
    "request_id incarnation outcome tokens local_tokens probed_keys duration_s",
    "A lookup answered; `outcome` is one of the words of LookupOutcome, `tokens` the size of the offer.",
)
REQUEST_EXCLUDED = _event(
    "akv.request.excluded",
    "debug",
    "request_id incarnation reason",
    'A request neither reads nor writes. `reason`: "media_unknown", its prompt has media without digests; "unsalted", it has '
    "no salt, and `require_salt` asks for one. Its lookups end with the same word.",
)
MEDIA_UNKNOWN = _event(
    "akv.request.media_unknown",
    "warning",
    "request_id incarnation",
    "The first request of this connector whose media have no digests: the placeholders of two pictures look alike, so nothing "
    "is read or saved for such requests. Let the engine's adapter give a digest for each. Told once; akv.request.excluded "
    "counts them.",
)
KEYS_FOREIGN = _event(
    "akv.keys.foreign",
    "warning",
    "key_format",
    'The keys are spelt as another system spells them ("trtllm"), and its servers may share the pool. Older ones may have '
    "stored pages that were not computed, or that were used again, under valid keys: what is loaded is as good as its writer.",
)
REQUEST_UNRELEASED = _event(
    "akv.request.unreleased",
    "warning",
    "request_id incarnation grace_s",
    "The block of a request was left while a device copy still touched its pages. They must not be used again before "
    "`Request.closed`, or a SavesCompleted, says so.",
)
LOAD_QUEUED = _event(
    "akv.load.queued",
    "debug",
    "request_id incarnation load_id pages bytes",
    "A reservation was taken up and waits for a loader.",
)
LOAD_COMPLETE = _event(
    "akv.load.complete",
    "debug",
    "request_id incarnation load_id pages bytes direct_pages direct_bytes staged staged_bytes duration_s",
    "Every page of a load is in the engine's cache: some read straight from segments of this host, the others `staged`, which "
    "counts them by the reason, as `staged_bytes` counts their bytes.",
)
CONNECTOR_STATS = _event(
    "akv.connector.stats",
    "info",
    "direct_pages direct_bytes staged staged_bytes segments segment_bytes",
    "Every `stats_interval_s`, if it changed, and when the connector closes: which way the pages of all loads came since it "
    "opened, straight from `segments` of this host that are mapped, or through the store, by the reason.",
)
STATS_UNPOSTED = _event(
    "akv.connector.stats_unposted",
    "warning",
    "error",
    "What the connector counted could not be written beside the segment register, so `akv stat` does not show it.",
)
LOAD_FAILED = _event(
    "akv.load.failed",
    "warning",
    "request_id incarnation load_id reason pages duration_s",
    "The pool did not deliver a page of a load. The request computes instead; nothing else is affected.",
)
LOAD_FAILED_KEY = _event(
    "akv.load.failed_key",
    "debug",
    "request_id incarnation load_id key state code",
    "Which page a failed load missed first. Apart from akv.load.failed because page keys are logged at debug level only.",
)
LOAD_CANCELLED = _event(
    "akv.load.cancelled",
    "debug",
    "request_id incarnation load_id pages duration_s",
    "A load ended because its request was cancelled, finished or preempted.",
)
SAVE_QUEUED = _event(
    "akv.save.queued",
    "debug",
    "request_id incarnation save_id blocks pages bytes",
    "Computed blocks wait for a saver.",
)
SAVE_COMPLETE = _event(
    "akv.save.complete",
    "debug",
    "request_id incarnation save_id blocks bytes duration_s",
    "The pool took blocks.",
)
SAVE_REFUSED = _event(
    "akv.save.refused",
    "info",
    "request_id incarnation save_id blocks reason",
    "The pool did not take blocks, after the last attempt. They are offered again after `save_backoff_s`, as long as the "
    'request holds their pages. `reason` is that of the first of them: "no_space" and "unavailable" were tried again before; '
    '"missing" is a window page that was accepted and is not there: another writer of it has not finished.',
)
SAVE_RETRIED = _event(
    "akv.save.retried",
    "debug",
    "request_id incarnation save_id group pages attempts stored found reason",
    "Of one batch of a save the pool did not take `pages` pages at once, for `reason`, that of the first. After `attempts` "
    "attempts `stored` of them were accepted and `found` were there already, from another writer; the rest is refused. Seen "
    'often with "no_space", it says that the pool evicts too late: lower its high watermark.',
)
SAVE_DROPPED = _event(
    "akv.save.dropped",
    "debug",
    "request_id incarnation save_id blocks reason",
    "Blocks were withdrawn before they were read, or before the pool was seen to hold their window pages: their request was "
    "cancelled, or their pass never ran.",
)
BACKLOG_FULL = _event(
    "akv.save.backlog_full",
    "info",
    "requests blocks window_pages listed_again backlog_bytes backlog_passes",
    "Of what one pass, or the end of a request, handed over for saving the backlog had no room for `blocks` blocks of full "
    "attention, the last of each request's, and for `window_pages` pages of windows. The blocks are refused and offered again "
    "after `save_backoff_s`, as long as their request holds the pages; the window pages are lost. `listed_again` blocks are "
    "in the pool as far as known, and their lease is not renewed. The pool takes pages more slowly than passes compute them: "
    "raise `savers`, or `backlog_bytes` and `backlog_passes` if it catches up between bursts.",
)
SNAPSHOT_DROPPED = _event(
    "akv.snapshot.dropped",
    "info",
    "request_id incarnation pages reason",
    'Window pages of a prompt\'s end were not copied, so a later lookup falls back to an earlier end. `reason`: "no_slots" in '
    'time, raise `snapshot_slots` or `snapshot_wait_ms`; "too_large" for all slots together, raise `snapshot_slots`; '
    '"cancelled", the pass or the request was; "backlog_full", as akv.save.backlog_full.',
)
SAVE_HOLD_EXPIRED = _event(
    "akv.save.hold_expired",
    "warning",
    "request_id incarnation saves held_s",
    "The pages of a finished request were held for `held_s` seconds while `saves` saves had not ended. They are given back, "
    "and what had not begun to be saved is not. The pool takes less than is computed: see `Connector.pressure()`, or raise "
    "`save_hold_max_s` if the engine can spare the pages.",
)
WINDOW_END = _event(
    "akv.window.end",
    "debug",
    "request_id incarnation pages ends wanted_ends",
    "A prompt is complete. Of the `wanted_ends` at which the rewind lets a later request resume, `ends` have their window "
    "among the `pages` that the engine still held. Fewer mean that it keeps too little behind the window: raise its "
    "retention.",
)
WINDOW_TAIL_MISSING = _event(
    "akv.window.tail_missing",
    "info",
    "request_id incarnation block",
    "A request finished at block `block` without the whole window before it: not held any more, or not copied. The next turn "
    "resumes further back. A retention of one block is enough for the first.",
)
SLOTS_WITHHELD = _event(
    "akv.slots.withheld",
    "warning",
    "slots state code",
    "Transfers of `slots` keys failed, and over RDMA a peer may touch their slots later: out of use until the end. "
    "Told for the first of a buffer; `kv.pressure()` counts all. With too many the breaker opens: open the connector anew.",
)
MEMORY_KEPT = _event(
    "akv.memory.kept",
    "warning",
    "bytes",
    "The store would not unregister a buffer of a connector that closed. A peer may still write there: it is never freed.",
)
PAGES_QUARANTINED = _event(
    "akv.pages.quarantined",
    "debug",
    "request_id incarnation pages",
    "A request or a load ended while a store call touched its pages themselves. They stay out of use until "
    "akv.pages.released.",
)
PAGES_RELEASED = _event(
    "akv.pages.released",
    "debug",
    "request_id incarnation pages",
    "The store call returned, and pages left quarantine.",
)
PAGES_DAMAGED = _event(
    "akv.pages.damaged",
    "warning",
    "pages",
    "Pages from the pool were not those that their keys name, by `integrity`. They were removed, and their loads failed. "
    'Damage in memory or on the way; with "mac" perhaps a client that writes what it must not.',
)
PLAN_DROPPED = _event(
    "akv.plan.dropped",
    "debug",
    "plan_id saves reason",
    "A pass was planned and did not run. Its blocks are listed again by a later plan.",
)
