"""Admission, batches and turns of the pooled engine, played at random with a model of its own."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.control.attention_rotation import replica_of, replicas_of
from reference.control.attention_serving import Place, Prefill, Serving, ServingOptions, Span, Turn
from reference.vocab.actions import Finish, Reject
from reference.vocab.errors import BadInput, IllegalEvent


class Play:
    """Obeys a Serving and keeps its own books on what may happen."""

    def __init__(self, options: ServingOptions, rng: Random) -> None:
        self.options, self.rng, self.serving = options, rng, Serving(options)
        self.asked: dict[int, tuple[int, int, set[int]]] = {}
        self.placed: dict[int, tuple[int, ...]] = {}
        self.done: dict[int, int] = {}
        self.ended: dict[int, tuple[str, str]] = {}
        self.running: dict[int, Turn] = {}
        self.away: dict[int, int] = {}
        self.next_slice = [0] * options.batches
        self.aboard: dict[int, tuple[Span, ...]] = {}
        self.sizes: list[list[int]] = []
        self.making: dict[int, int] = {}
        """Each busy prefill worker's request, wanted or not."""
        self.way: dict[int, list[bool]] = {}
        """Of each request whose prompt is on its way: run? pulled?"""
        self.worker_of: dict[int, int] = {}

    def obey(self) -> None:
        for action in self.serving.next_actions():
            if isinstance(action, Place):
                assert action.request not in self.placed
                self.placed[action.request] = action.devices
                self.done[action.request] = 0
                self.check_room()
            elif isinstance(action, Prefill):
                self.prefill(action)
            elif isinstance(action, Turn):
                self.start(action)
            else:
                assert isinstance(action, Finish | Reject)
                assert action.request not in self.ended
                what = ("rejected", action.reason) if isinstance(action, Reject) else (
                    action.reason, action.error)  # fmt: skip
                self.ended[action.request] = what
                self.placed.pop(action.request, None)
                self.way.pop(action.request, None)

    def prefill(self, action: Prefill) -> None:
        """LAMINA-12: one prompt at a time on a worker, two of which it has KV; where it was lost,
        the same worker runs it again."""
        r, worker = action
        assert worker not in self.making and r in self.placed and r not in self.way
        assert self.worker_of.setdefault(r, worker) == worker
        self.making[worker], self.way[r] = r, [False, False]
        assert sum(self.worker_of[x] == worker for x in self.way) <= 2

    def on_its_way(self, r: int, what: int) -> None:
        """The prompt was run (0) or all of it was pulled (1); with both it is a batch's."""
        self.way[r][what] = True
        if all(self.way[r]):
            del self.way[r]
            self.done[r] = self.asked[r][0]

    def check_room(self) -> None:
        """LAMINA-4, from the actions alone."""
        o = self.options
        held = [0] * o.devices
        for r, devices in self.placed.items():
            prompt, new, _ = self.asked[r]
            for d in devices:
                held[d] += -(-(prompt + new) // o.kv_block)
        assert max(held) <= o.blocks
        if o.partition == "head":
            assert len(set(held)) == 1

    def start(self, turn: Turn) -> None:
        batch = turn.batch
        assert turn.slice == self.next_slice[batch]
        assert batch not in self.running and batch not in self.away
        assert turn.replica not in {t.replica for t in self.running.values()}
        assert (turn.held == -1) == (turn.slice == 0)
        if turn.slice == 0:
            assert turn.spans
            elsewhere = {s.request for b, spans in self.aboard.items() if b != batch
                         for s in spans}
            for r, start, end in turn.spans:
                assert r not in elsewhere and start == self.done[r] < end
                assert end - start <= self.options.chunk and r in self.placed
                assert r not in self.way and (not self.options.prefill or r in self.worker_of)
            self.aboard[batch] = turn.spans
            self.sizes.append([len(self.aboard.get(b, ())) for b in range(self.options.batches)])
        assert turn.spans == self.aboard[batch]
        self.running[batch] = turn

    def step(self) -> bool:
        options = [("slice", b) for b in self.running] + [("back", b) for b in self.away]
        options += [("made", w) for w in self.making]
        options += [("pulled", r) for r, (_, whole) in self.way.items() if not whole]
        if not options:
            return False
        what, batch = self.rng.choice(sorted(options))
        if what == "made":
            r = self.making.pop(batch)
            stopped = 1 in self.asked[r][2]
            if r in self.way:
                self.on_its_way(r, 0)
            self.serving.prefilled(batch, r, stopped)
            return True
        if what == "pulled":
            self.on_its_way(batch, 1)
            self.serving.pulled(batch)
            return True
        if what == "back":
            del self.away[batch]
            self.serving.attention_done(batch)
            return True
        turn = self.running.pop(batch)
        if turn.slice < self.options.layers:
            self.next_slice[batch] += 1
            self.away[batch] = turn.slice
            self.serving.slice_done(batch)
            return True
        stopped = set()
        self.next_slice[batch] = 0
        for r, _, end in self.aboard.pop(batch):
            self.done[r] = end
            prompt, _, stops = self.asked[r]
            if end >= prompt and end - prompt + 1 in stops:
                stopped.add(r)
        self.serving.token_done(batch, stopped)
        return True

    def void(self, batch: int) -> None:
        """The batch's token is begun again."""
        self.running.pop(batch, None)
        self.away.pop(batch, None)
        self.aboard.pop(batch, None)
        self.next_slice[batch] = 0

    def lose_replica(self) -> None:
        """A batch that is anywhere in its token begins it again."""
        under_way = sorted(self.aboard)
        if under_way:
            batch = self.rng.choice(under_way)
            self.serving.redo(batch)
            self.void(batch)

    def lose_memory(self) -> None:
        """Requests with KV on a device run their text again; their batches' tokens too."""
        device = self.rng.randrange(self.options.devices)
        gone = set(self.serving.lost(device))
        assert gone == {r for r, devices in self.placed.items() if device in devices}
        for r in gone:
            self.done[r] = 0
            if r in self.way:  # all of its prompt is to be pulled again
                self.way[r][1] = False
        for batch in [b for b, spans in self.aboard.items() if gone & {x.request for x in spans}]:
            self.void(batch)

    def lose_worker(self) -> None:
        """What a prefill worker ran, and what it held, begins again there."""
        if not self.options.prefill:
            return
        worker = self.rng.randrange(self.options.prefill)
        again = {r for r in self.way if self.worker_of[r] == worker}
        assert set(self.serving.lost_worker(worker)) == again
        self.making.pop(worker, None)
        for r in again:
            del self.way[r]

    def arrive(self, r: int, prompt: int, new: int, stops: set[int]) -> None:
        self.asked[r] = prompt, new, stops
        self.serving.arrived(r, prompt, new)


@pytest.mark.rule("LAMINA-1", "LAMINA-4", "LAMINA-8", "LAMINA-12", "LAMINA-25")
@given(st.integers(0, 10**9))
def test_everything_that_is_asked_for_is_served(seed: int) -> None:
    rng = Random(seed)
    options = ServingOptions(
        layers=rng.randrange(1, 4), kv_heads=(4,), batches=rng.randrange(1, 5),
        order=rng.choice(["rotation", "queue"]), max_batch=rng.randrange(1, 5),
        chunk=rng.randrange(1, 6), devices=rng.choice([1, 2, 4]),
        partition=rng.choice(["head", "request"]), blocks=rng.randrange(3, 12), kv_block=4,
        prefill=rng.choice([0, 0, 1, 2]),
    )  # fmt: skip
    play, cancelled = Play(options, rng), set()
    left = rng.randrange(1, 15)
    while True:
        if left and rng.random() < 0.2:
            left -= 1
            r = len(play.asked)
            play.arrive(r, rng.randrange(1, 20), rng.randrange(0, 9),
                        {rng.randrange(9)} if rng.random() < 0.2 else set())
        if play.asked and rng.random() < 0.03:
            cancelled.add(r := rng.randrange(len(play.asked)))
            play.serving.cancelled(r)
        if rng.random() < 0.02:
            play.obey()
            rng.choice([play.lose_replica, play.lose_memory, play.lose_worker])()
        play.obey()
        if not play.step() and not left:
            play.obey()
            break
    assert play.serving.idle and not play.placed and not play.way
    assert set(play.ended) == set(play.asked)
    for r, (reason, _) in play.ended.items():
        prompt, new, stops = play.asked[r]
        blocks = -(-(prompt + new) // 4)
        assert (reason == "rejected") == (blocks > options.blocks)
        if reason == "cancelled":
            assert r in cancelled
        elif reason == "length":
            # With a prefill worker one token comes of the prompt's run, wherever its KV is.
            alone = options.prefill and new == 1
            assert new > 0 and (alone or play.done[r] == prompt + new - 1)
        elif reason == "stop":
            assert new == 0 or (1 if play.done[r] < prompt else play.done[r] - prompt + 1) in stops
    assert play.serving.pool.held() == [0] * options.devices


@pytest.mark.rule("LAMINA-6", "LAMINA-8", "LAMINA-10")
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_turns_follow_the_rotation(n: int) -> None:
    """Even load: replica (j + k) mod (n - 1), the first slice where the last one was, and the
    batches of the same size."""
    play = Play(ServingOptions(3, (4,), n, devices=2, blocks=10**6, kv_block=4, chunk=4), Random(n))
    for r in range(3 * n):
        play.arrive(r, 4, 40, set())
    count, moved, last = [0] * n, 0, [-1] * n
    start = play.start

    def watch(turn: Turn) -> None:
        nonlocal moved
        assert turn.replica == replica_of(turn.batch, count[turn.batch], n)
        if turn.slice == 0 and last[turn.batch] >= 0:
            assert turn.replica == last[turn.batch]
        moved += turn.held not in (-1, turn.replica)
        last[turn.batch] = turn.replica
        count[turn.batch] += turn.slice < 3
        start(turn)

    play.start = watch  # type: ignore[method-assign]
    play.obey()
    while play.step():
        play.obey()
    assert all(len(set(s)) == 1 for s in play.sizes[n:-3 * n])
    assert (moved > 0) == (replicas_of(n) > 1)
    assert {x for x, _ in play.ended.values()} == {"length"}


def test_bad_options_and_events_are_refused() -> None:
    for bad in ({"layers": 0}, {"devices": 3}, {"batches": 0}, {"chunk": 0}):
        with pytest.raises(BadInput):
            Serving(ServingOptions(**({"layers": 2, "kv_heads": (4,)} | bad)))
    serving = Serving(ServingOptions(2, (4,)))
    for event in (serving.slice_done, serving.attention_done, serving.token_done):
        with pytest.raises(IllegalEvent):
            event(0)
    serving.arrived(0, 5, 5)
    serving.cancelled(0)
    assert serving.next_actions() == [Finish(0, "cancelled", "")]
    serving.cancelled(77)
    assert serving.idle
