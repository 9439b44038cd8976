"""The JAX engine as a rule-based machine, against what a handle promises.

Every rule is one thing that a caller or a disk can do; then the engine comes to rest by itself, and
what each handle says must be true: tokens are a beginning of those that the request has alone, it
ends once and for a reason that there was, and bits are equal to the last when it ends well.
"""

from __future__ import annotations

from typing import Any, ClassVar

from engines import MINIMUM, alone, judge, request, same
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from property_tests.driven import driven
from property_tests.machine import SMALL, Traced
from reference.handle import RequestHandle
from reference.vocab.ids import ExpertKey

ASKED = (request("a", 1, 2), request("b", 3, 1), request("c", 6, 0), request("d", 5, 2))
SLOTS = 4


class EngineMachine(Traced):
    """One engine with few slots, two fetch threads and one retry."""

    options: ClassVar[dict[str, Any]] = {}
    most: ClassVar[int] = 5

    @initialize(
        mode=st.sampled_from(["visit", "expert"]),
        running=st.sampled_from([1, 8]),
        tier=st.sampled_from([0, 3, 8]),
        first=st.lists(SMALL, max_size=2),
    )
    def start(self, mode: str, running: int, tier: int, first: list[int]) -> None:
        self.begin(mode, running, tier)
        for which in first:
            self.submit(which)

    def begin(self, mode: str, running: int, tier: int) -> None:
        """`tier`: experts that host memory holds beside those in slots; 0 for no such tier."""
        options: dict[str, Any] = {
            "readiness": mode, "max_running": running, "retries": 1, "threads": 2,
            "host_memory": tier * MINIMUM // 2 if tier else None,
        }  # fmt: skip
        memory = SLOTS // 2 * MINIMUM
        self.context = driven(memory, chunk=4 if running > 1 else 32, max_rows=32,
                              **options | self.options)  # fmt: skip
        self.d = self.context.__enter__()
        self.handles: list[RequestHandle] = []
        self.given_up: set[int] = set()
        self.draining = self.closed = False
        self.failed: dict[ExpertKey, int] = {}
        """Failures of each expert, ever."""
        self.trace.append("begin")

    def rest(self) -> dict[int, ExpertKey]:
        try:
            return self.d.settle()
        except TimeoutError as error:
            self.check(False, str(error))
            raise

    def held(self) -> list[int]:
        return [] if self.closed else sorted(self.d.reader.held())

    def fresh(self) -> list[int]:
        """Loads in flight that nobody has given up on."""
        return [t for t in self.held() if t not in self.d.overdue()]

    def note_failure(self, ticket: int) -> None:
        key = self.d.reader.held()[ticket]
        self.failed[key] = self.failed.get(key, 0) + 1

    # -- rules

    @precondition(lambda self: len(self.handles) < self.most and not self.closed)
    @rule(which=SMALL)
    def submit(self, which: int) -> None:
        self.trace.append("submit")
        asked = ASKED[which % len(ASKED)]
        self.handles.append(self.d.engine.submit(asked, logits=True))
        self.rest()

    @precondition(lambda self: self.held())
    @rule(which=SMALL)
    def complete(self, which: int) -> None:
        held = self.held()
        self.trace.append("complete")
        self.d.reader.release(held[which % len(held)])
        self.rest()

    @precondition(lambda self: self.fresh() and sum(self.failed.values()) < 3)
    @rule(which=SMALL)
    def fail(self, which: int) -> None:
        held = self.fresh()
        self.trace.append("fail")
        ticket = held[which % len(held)]
        self.note_failure(ticket)
        self.d.reader.fail(ticket)
        self.rest()

    @precondition(lambda self: self.fresh() and len(self.d.overdue()) < 2)
    @rule(which=SMALL)
    def stall(self, which: int) -> None:
        """The load is reported overdue; it stays held, so it ends late."""
        held = self.fresh()
        self.trace.append("stall")
        ticket = held[which % len(held)]
        self.note_failure(ticket)
        self.d.give_up(ticket)
        self.rest()

    @precondition(lambda self: self.handles and not self.closed)
    @rule(which=SMALL)
    def cancel(self, which: int) -> None:
        self.trace.append("cancel")
        open_ = [h for h in self.handles if not h.done] or self.handles
        handle = open_[which % len(open_)]
        self.given_up.add(handle.number)
        handle.cancel()
        self.rest()
        self.check(handle.done, "a cancelled request goes on")

    @precondition(lambda self: len(self.handles) > 2 and not self.draining and not self.closed)
    @rule()
    def drain(self) -> None:
        self.trace.append("drain")
        self.draining = True
        self.d.engine.drain()
        self.rest()

    @precondition(lambda self: len(self.trace) > 8 and not self.closed)
    @rule(hangs=st.booleans())
    def close(self, hangs: bool) -> None:
        """With `hangs`, transfers in flight do not come back in time."""
        self.trace.append("close")
        self.closed = True
        if not hangs:
            self.d.reader.open_all()
        self.d.engine.close(timeout_s=0.1 if hangs else 10.0)
        for handle in self.handles:
            self.check(handle.done, "closed, and a request has no end")

    @rule()
    def look(self) -> None:
        """Nothing happens."""

    # -- what is promised

    @invariant()
    def handles_keep_their_promises(self) -> None:
        if not hasattr(self, "handles") or self.broken[-1:] == [len(self.runs)]:
            return
        failure = self.d.engine.failure
        self.check(failure is None or self.closed, f"the engine broke: {failure!r}")
        for handle in self.handles:
            right = alone(handle.request)
            tokens = tuple(handle._tokens)
            self.check(tokens == right[0][: len(tokens)], f"tokens {tokens}, not {right[0]}")
            if handle.done:
                self.ended(handle, right)
        waiting = [h for h in self.handles if not h.done]
        self.check(not waiting or self.held(), "requests wait, and nothing is in flight")
        if not waiting and not self.closed:
            missing = self.d.loop.missing()
            if self.held():  # entries of the tier that transfers are on their way to or from
                missing.pop("entries", None)
            self.check(not any(missing.values()), f"left behind: {missing}")

    def ended(self, handle: RequestHandle, right: Any) -> None:
        result = handle.result(0)
        reason = result.finish_reason
        if reason in ("length", "stop"):
            self.check(same(result, right), "other bits than alone")
        elif reason == "cancelled":
            self.check(handle.number in self.given_up or self.closed, "nobody cancelled it")
        elif reason == "rejected":
            self.check(self.draining and "drain" in (result.error or ""), "why rejected?")
        else:
            lost = max(self.failed.values(), default=0) > 1
            self.check(self.closed or (lost and "cannot be read" in (result.error or "")),
                       f"an error out of nothing: {result.error}")  # fmt: skip

    def teardown(self) -> None:
        """Everything completes: every request ends, nothing is left, the log is in order."""
        if not hasattr(self, "d"):
            return
        fine = self.broken[-1:] != [len(self.runs)]
        try:
            if fine and not self.closed:
                self.finish()
        finally:
            self.context.__exit__(None, None, None)
        if fine:
            engine = self.d.engine
            self.check(not engine.failure or self.closed, f"closing: {engine.failure!r}")
            judge(engine, complete="end" in engine.records[-1])

    def finish(self) -> None:
        for _ in range(500):
            held = self.rest()
            if not held:
                break
            self.d.reader.release(min(held))
        self.handles_keep_their_promises()
        self.check(all(h.done for h in self.handles), "no end")
