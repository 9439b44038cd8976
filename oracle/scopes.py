"""The named small worlds that are explored whole, and what each is there to show."""

from __future__ import annotations

from oracle.scope import Scope, scope
from oracle.scopes_large import LARGE
from oracle.scopes_policies import POLICIES

__all__ = ["SCOPES", "Scope"]

_TWO = ((1, 2), (1, 1))
"""Two requests of one prompt token: one makes two tokens, one makes one."""
_BULK = ((3, 1), (1, 2))
"""A prompt of two chunks (2 tokens, then 1) beside a decoding request."""

_ALL = (
    # k = 1
    scope(
        "thrash-k1",
        "one slot for two requests: what is loaded must be used before it goes",
        (2, 2, 1, 1), ((1, 2), (1, 2)),
    ),
    scope(
        "faults-k1",
        "3 requests x 2 layers x 2 tokens x 3 experts x 2 slots; a load fails, a request ends",
        (2, 3, 1, 2), ((1, 2), (1, 2), (1, 2)), load_faults=1, cancels=1,
    ),
    scope(
        "arrivals-k1",
        "requests come while others run",
        (2, 2, 1, 2), ((1, 2), (1, 1), (1, 1)), initial=1,
    ),
    scope(
        "kv-k1",
        "KV room for one of three at a time, one fits exactly; a fourth can never fit",
        (1, 2, 1, 1), ((1, 1), (2, 2), (1, 2), (3, 2)), kv_tokens=4, max_running=2,
    ),
    scope(
        "lost-k1",
        "an expert that cannot be read: one retry, then those who need it end",
        (1, 2, 1, 1), ((1, 1), (1, 1)), retries=1, load_faults=3, undrained=True,
    ),
    scope(
        "lostpart-k2",
        "an expert is lost while another part of the same visit runs",
        (1, 3, 2, 2), ((1, 1), (1, 2)), readiness="expert", retries=0, load_faults=1,
        undrained=True,
    ),
    scope(
        "giveup-k2", "cancels in expert mode while others wait for the slots",
        (1, 4, 2, 2), ((1, 2), (1, 1)), readiness="expert", cancels=1,
    ),
    scope(
        "drain-k1",
        "drain and cancel at every point, also while results are owed",
        (2, 2, 1, 1), ((1, 1), (1, 1), (1, 1)), initial=1, max_running=2, drains=1, cancels=1,
        split=True,
    ),
    # k = 2, visit mode: k, k + 1 and k + 2 slots
    scope("visit-k2-s2", "claims with no slot to spare", (2, 3, 2, 2), _TWO),
    scope("visit-k2-s3", "claims with one slot to spare", (2, 3, 2, 3), _TWO),
    scope("visit-k2-s4", "claims with two slots to spare", (2, 4, 2, 4), _TWO),
    scope(
        "visit-k2-c2",
        "two channels: transfers end in any order; several events before an ask",
        (1, 4, 2, 3), ((1, 2), (1, 2)), channels=2, batch=True, load_faults=1, undrained=True,
    ),
    scope(
        "pair-k2-c2", "two channels and a cancel, one token each",
        (1, 3, 2, 3), ((1, 1), (1, 1)), channels=2, cancels=1, load_faults=1, undrained=True,
    ),
    scope(
        "three-k2-s4",
        "three claims contend for four slots",
        (1, 4, 2, 4), ((1, 2), (1, 2), (1, 1)),
    ),
    # k = 2, expert mode
    scope("expert-k2-s2", "tasks with no slot to spare", (2, 3, 2, 2), _TWO, readiness="expert"),
    scope("expert-k2-s3", "tasks with one slot to spare", (2, 3, 2, 3), _TWO, readiness="expert"),
    scope(
        "expert-k2-s4",
        "tasks with two slots to spare, two channels, a failed load",
        (1, 4, 2, 4), ((1, 2), (1, 1)), readiness="expert", channels=2, load_faults=1,
    ),
    # k = 2, the barrier
    scope(
        "lockstep-k2-s2", "the barrier, no slot to spare", (2, 3, 2, 2), _TWO, grouping="lockstep",
    ),
    scope(
        "lockstep-k2-s3",
        "the barrier, fetching overlapped; requests come in the middle",
        (2, 3, 2, 3), _TWO, grouping="lockstep", initial=1, cancels=1,
    ),
    scope(
        "blocking-k2-s4",
        "the barrier, fetching and computing apart; a failed load",
        (2, 4, 2, 4), _TWO, grouping="lockstep-blocking", load_faults=1, undrained=True,
    ),
    # k = 2, prompts whose chunks need more experts than there are slots
    scope(
        "bulk-k2-s2",
        "a chunk of two tokens over four experts in two slots: waves, beside a decoding request",
        (1, 4, 2, 2), _BULK,
    ),
    scope(
        "bulk-k2-s3",
        "the same over two layers with one slot to spare",
        (2, 4, 2, 3), _BULK,
    ),
    scope(
        "bulk-k2-s4",
        "the same in expert mode with two slots to spare, a cancel, a scored request",
        (1, 4, 2, 4), ((3, 1), (2, 0)), readiness="expert", cancels=1, eviction="global",
    ),
    scope(
        "lockbulk-k2-s3",
        "a prompt in waves behind the barrier",
        (1, 4, 2, 3), _BULK, grouping="lockstep",
    ),
    # Failures of steps and of requests
    scope(
        "failed-k2",
        "steps fail, for all of their requests or for one; texts stop early",
        (1, 3, 2, 3), ((1, 1), (1, 2)), step_faults=2, stops=True,
    ),
    scope(
        "cancel-k2",
        "cancels and a failed load while claims wait; several events before an ask",
        (2, 3, 2, 3), ((1, 1), (1, 1)), load_faults=1, cancels=1, batch=True,
    ),
    scope(
        "rows-k1", "steps of at most two rows: prompts share them only where they fit",
        (1, 2, 1, 2), ((2, 1), (1, 1), (2, 0)), max_rows=2, readiness="expert",
    ),
    scope(
        "lockwait-k1", "the barrier while results are told one by one and requests come",
        (2, 2, 1, 2), ((1, 1), (1, 1), (1, 1)), grouping="lockstep", initial=2, split=True,
    ),
    scope(
        "bulkturn-k2-s3", "a prompt in waves beside two decoding requests that want the channel",
        (1, 3, 2, 3), ((3, 1), (1, 1), (1, 1)), bulk_slots=1,
    ),
    scope(
        "split-k2-s3", "results told one by one, with asks between, and several before an ask",
        (1, 3, 2, 3), ((1, 2), (1, 1)), split=True, batch=True,
    ),
    # The other orders, and lag
    scope(
        "first-come-k1", "in order of arrival at the router",
        (1, 3, 1, 2), ((1, 2), (1, 2), (1, 1)), fetch_order="first-come", cancels=1,
    ),
    scope(
        "fewest-k2", "fewest missing first, and nobody passed over for ever",
        (1, 4, 2, 3), ((1, 2), (1, 2)), fetch_order="fewest-missing", max_lag=2,
    ),
    scope(
        "lag-k1", "nobody gets two visits ahead", (1, 3, 1, 2), ((1, 3), (1, 3)), max_lag=2,
    ),
    scope(
        "dense", "a model without experts", (0, 0, 0, 0), ((3, 2), (1, 1), (1, 0)), initial=1,
        cancels=1, step_faults=1, split=True,
    ),
    # Larger
    scope(
        "deep-k2-s4", "three layers, three tokens: long ways",
        (3, 3, 2, 4), ((1, 3), (1, 2)), initial=1,
    ),
    scope(
        "four-k1", "four requests in two slots, a failed load",
        (1, 3, 1, 2), ((1, 2), (1, 1), (1, 1), (1, 1)), initial=1, load_faults=1,
    ),
    scope(
        "order-k1", "two requests that come apart and diverge, three layers, two channels",
        (3, 2, 1, 3), ((1, 2), (2, 2)), initial=1, channels=2, readiness="expert",
        eviction="global", cancels=1,
    ),
    scope(
        "swarm-k2", "three requests, two layers, no slot to spare, expert mode",
        (2, 3, 2, 2), ((1, 2), (1, 1), (1, 1)), readiness="expert",
    ),
    scope(
        "late-k1", "as faults-k1, and the failed load's write may land late",
        (2, 3, 1, 2), ((1, 2), (1, 2), (1, 2)), load_faults=1, undrained=True, cancels=1,
    ),
    scope(
        "faults-k2", "failed loads, failed steps, a cancel and a drain together",
        (2, 3, 2, 3), ((1, 1), (1, 1), (1, 1)), initial=2, load_faults=1, undrained=True,
        step_faults=1, cancels=1, drains=1,
    ),
)  # fmt: skip

SCOPES: dict[str, Scope] = {s.name: s for s in (*_ALL, *LARGE, *POLICIES)}
