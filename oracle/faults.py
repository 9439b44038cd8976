"""The seeded faults: each one line of the shipped code, and the one property that must notice.

Control's are found by exploring the named scopes. Those of the executors lie in
`oracle/executor_faults.py`.
"""

from __future__ import annotations

from oracle.executor_faults import EXECUTOR_MUTANTS
from oracle.patching import Mutant

CACHE, FETCH, GROUP, LIFE, SCHED = (
    f"reference.control.{name}" for name in ("cache", "fetch", "grouping", "lifecycle", "scheduler")
)


def _m(name: str, module: str, old: str, new: str, declared: str, *scopes: str) -> Mutant:
    return Mutant(name, module, old, new, declared, scopes)


CONTROL_MUTANTS: tuple[Mutant, ...] = (
    _m(
        "cancel-in-queue-untold",
        LIFE,
        's.terminal.append(Finish(e.request, "cancelled"))',
        "pass",
        "S1",
        "drain-k1",
    ),
    _m(
        "drain-untold",
        LIFE,
        's.terminal.append(Reject(q.number, "draining"))',
        "pass",
        "S1",
        "drain-k1",
    ),
    _m(
        "finish-twice",
        LIFE,
        "s.terminal.append(Finish(r.number, reason, error))",
        "s.terminal += [Finish(r.number, reason, error)] * 2",
        "S2",
        "visit-k2-s2",
    ),
    _m(
        "cancel-ends-running-step",
        LIFE,
        "if r.status == RUNNING:\n        if r.doomed",
        "if False:\n        if r.doomed",
        "S2",
        "faults-k1",
    ),
    _m(
        "length-off-by-one",
        LIFE,
        "elif r.sampled >= r.max_new:",
        "elif r.sampled > r.max_new:",
        "S2",
        "visit-k2-s2",
    ),
    _m(
        "one-slot-too-many",
        SCHED,
        "ExpertCache(options.slots, ",
        "ExpertCache(options.slots + 1, ",
        "S3",
        "visit-k2-s2",
    ),
    _m(
        "ticket-of-the-slot",
        CACHE,
        "        ticket = self.next_ticket\n        self",
        "        ticket = slot + 1\n        self",
        "S3",
        "visit-k2-s2",
    ),
    _m(
        "loading-slot-booked-free",
        CACHE,
        "        self.state[slot] = LOADING\n",
        "",
        "S3",
        "visit-k2-s2",
    ),
    _m("step-reused", GROUP, "s.next_step += 1", "pass", "S4", "visit-k2-s2"),
    _m(
        "reads-what-is-there",
        FETCH,
        "absent = [c for c in r.need if s.absent(c)]",
        "absent = list(r.need)",
        "S5",
        "expert-k2-s3",
    ),
    _m(
        "barrier-reads-twice",
        FETCH,
        "for c in r.need if s.absent(c)}",
        "for c in r.need}",
        "S5",
        "lockstep-k2-s3",
    ),
    _m(
        "evict-while-read",
        CACHE,
        "and slot not in self.readers\n",
        "and True\n",
        "S6",
        "bulk-k2-s3",
    ),
    _m(
        "quarantined-slot-is-free",
        CACHE,
        "if not drained:",
        "if drained and not drained:",
        "S7",
        "lost-k1",
    ),
    _m(
        "believes-late-completion",
        LIFE,
        "e.drained) if current(s, e.ticket) else -1",
        "e.drained) if e.drained and current(s, e.ticket) else -1",
        "S8",
        "lost-k1",
    ),
    _m(
        "slots-by-number",
        GROUP,
        "sorted((code % per_layer, slot) for code, slot in slots.items())",
        "list(zip(sorted(c % per_layer for c in slots), sorted(slots.values())))",
        "S9",
        "visit-k2-s3",
    ),
    _m(
        "directory-keeps-evicted",
        CACHE,
        "del self.where[self.code[slot]]",
        "pass",
        "S9",
        "visit-k2-s3",
    ),
    _m(
        "first-token-only",
        LIFE,
        "for token in e.experts for x in token}",
        "for token in e.experts[:1] for x in token}",
        "S10",
        "bulk-k2-s3",
    ),
    _m(
        "part-says-last",
        GROUP,
        "tuple([c % per_layer for c in codes]), not rest)",
        "tuple([c % per_layer for c in codes]), True)",
        "S10",
        "expert-k2-s2",
    ),
    _m(
        "layers-mixed",
        GROUP,
        "return [x for x in ready if x[0].stage == stage]",
        "return ready",
        "S10",
        "visit-k2-s4",
    ),
    _m(
        "barrier-ignored",
        GROUP,
        "if s.lockstep and r.stage != s.front:",
        "if False:",
        "S10",
        "lockstep-k2-s3",
    ),
    _m(
        "rows-not-counted",
        GROUP,
        "rows += x[0].rows",
        "rows = x[0].rows",
        "S11",
        "rows-k1",
    ),
    _m(
        "blocking-reads-on",
        FETCH,
        "if s.blocking and s.steps:",
        "if False:",
        "S11",
        "blocking-k2-s4",
    ),
    _m(
        "exact-fit-refused",
        LIFE,
        "elif blocks > o.kv_tokens // o.kv_block:",
        "elif blocks >= o.kv_tokens // o.kv_block:",
        "S2",
        "kv-k1",
    ),
    _m(
        "lost-expert-not-told",
        LIFE,
        '    r.doomed = ("error", error)\n',
        "",
        "S10",
        "lostpart-k2",
    ),
    _m(
        "routed-order-keeps-ended",
        LIFE,
        "    if r.number in s.routed_order:\n",
        "    if False:\n",
        "L1",
        "first-come-k1",
    ),
    _m(
        "kv-overcommitted",
        LIFE,
        " and s.queue[0].blocks <= s.kv_free:",
        ":",
        "S11",
        "kv-k1",
    ),
    _m(
        "one-running-too-many",
        LIFE,
        "len(s.running) < s.options.max_running",
        "len(s.running) <= s.options.max_running",
        "S11",
        "drain-k1",
    ),
    _m(
        "one-load-too-many",
        FETCH,
        "while channels > 0:",
        "while channels >= 0:",
        "S11",
        "visit-k2-s3",
    ),
    _m(
        "claim-outlives-request",
        LIFE,
        "s.cache.hold(r.need, -1)",
        "pass",
        "L1",
        "cancel-k2",
    ),
    _m(
        "task-outlives-request",
        LIFE,
        "    if r.need:\n        s.cache.want(r.need, -1, not s.claims or r.bulk)",
        "    if r.need:\n        s.cache.want(r.need, -1, r.bulk)",
        "L3",
        "giveup-k2",
    ),
    _m("claims-hold-nothing", CACHE, "add(self.holds, codes, by)", "pass", "L1", "visit-k2-s3"),
    _m("claim-outlives-step", GROUP, "cache.hold(codes, -1)", "pass", "L1", "visit-k2-s3"),
    _m(
        "evict-claimed",
        CACHE,
        "and code not in self.holds\n",
        "and True\n",
        "L1",
        "bulk-k2-s2",
    ),
    _m(
        "evict-unused",
        CACHE,
        "        if fresh:\n",
        "        if False:\n",
        "L2",
        "expert-k2-s2",
        "expert-k2-s3",
    ),
    _m(
        "reader-never-leaves",
        CACHE,
        "add(self.readers, (slot,), -1)",
        "pass",
        "L1",
        "expert-k2-s2",
    ),
    _m(
        "infeasible-admitted",
        LIFE,
        "elif blocks > o.kv_tokens // o.kv_block:",
        "elif False:",
        "L1",
        "kv-k1",
    ),
    _m("kv-not-returned", LIFE, "s.kv_free += r.blocks", "pass", "L1", "kv-k1"),
    _m(
        "fetch-waits-for-compute",
        FETCH,
        "if s.blocking and s.steps:",
        "if s.steps:",
        "L3",
        "expert-k2-s3",
    ),
    _m(
        "compute-waits-for-fetch",
        GROUP,
        "if s.blocking and (",
        "if (",
        "L3",
        "visit-k2-s3",
    ),
    _m(
        "forgets-to-retry",
        LIFE,
        "s.pending.insert(0, code)",
        "pass",
        "L1",
        "faults-k1",
    ),
    _m("newest-admitted-first", LIFE, "s.queue.pop(0)", "s.queue.pop()", "S2", "visit-k2-s2"),
    _m(
        "retries-for-ever",
        LIFE,
        "if fails <= s.options.retries:",
        "if True:",
        "L3",
        "lost-k1",
    ),
    _m(
        "failed-step-forgiven",
        LIFE,
        "e.requests or numbers",
        "e.requests",
        "L1",
        "failed-k2",
    ),
    _m(
        "drain-keeps-queue",
        LIFE,
        "    s.queue = []\n",
        "",
        "S2",
        "drain-k1",
    ),
)

ALL: tuple[Mutant, ...] = (*CONTROL_MUTANTS, *EXECUTOR_MUTANTS)

EQUIVALENT: list[dict[str, str]] = [
    {
        "name": "barrier-asks-who-stands-there",
        "proof": "grouping.py `if r.stage == s.front: return` -> `if False: return`: the next "
        "front is the stage with the least (stage - front) mod count, which is 0 for the front "
        "itself, so it stays while anybody stands there.",
    },
    {
        "name": "compute-asked-while-a-step-runs",
        "proof": "scheduler.py `if idle_compute and not self.steps` -> `if not self.steps`: "
        "idle_compute is 0 exactly while a step is in flight, and then `steps` holds it.",
    },
]
"""Changes that no property can notice, with the reason. They are not counted."""
