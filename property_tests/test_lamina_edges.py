"""Corners of the control of attention in another pool: gaps, hand-off, prompts, turns by hand."""

from __future__ import annotations

import pytest

from reference.control.attention_batches import Batches
from reference.control.attention_handoff import UNLIMITED, Gaps, HandOff
from reference.control.attention_partition import HeadPool, RequestPool, imbalance, longest_first
from reference.control.attention_prompts import Prompts
from reference.control.attention_rotation import Rotation, Steady
from reference.control.attention_serving import Serving, ServingOptions, Span
from reference.control.attention_wire import Opened, Protocol, Sent, WireBytes
from reference.vocab.actions import Finish
from reference.vocab.config import AttentionSpec
from reference.vocab.errors import BadInput, IllegalEvent


@pytest.mark.rule("LAMINA-12")
def test_room_lasts_as_long_as_the_shortest_gap_of_late() -> None:
    gaps = Gaps(0.5, kept=3)
    assert gaps.room(0.0) == UNLIMITED and gaps.wait_s(0.0) == 0.0, "nothing has been sent"
    gaps.empty(1.0)
    assert gaps.room(1.5) == UNLIMITED and gaps.wait_s(1.5) == 0.0, "no gap has been seen"
    gaps.message(3.0)
    assert gaps.room(3.5) == UNLIMITED and gaps.wait_s(3.5) == 0.0, "it is being answered"
    gaps.message(9.0)  # still the same turn: that is no gap
    gaps.empty(4.0)
    assert [gaps.room(t) for t in (4.0, 5.0, 5.6, 6.0, 11.9, 12.0)] == [4, 2, 0, 0, 0, UNLIMITED]
    assert [gaps.wait_s(t) for t in (5.0, 12.0, 13.0)] == [7.0, 0.0, 0.0]
    gaps.message(4.0)  # at once: that is no gap
    gaps.empty(4.0)
    assert gaps.room(5.0) == 2
    gaps.message(3.0)  # a clock that went back: neither
    gaps.empty(4.0)
    assert gaps.room(5.0) == 2
    gaps.empty(4.0, more=True)
    assert [gaps.room(t) for t in (4.0, 11.0, 12.0)] == [0, 0, UNLIMITED]
    gaps.message(5.0)  # of the same turn: that is no gap between turns
    for begin, end in ((10.0, 16.0), (20.0, 23.0), (30.0, 34.0)):
        gaps.empty(begin)
        gaps.message(end)
    gaps.empty(40.0)  # of late: 6, 3, 4; the first, 2, is forgotten
    assert [gaps.room(t) for t in (41.0, 55.9, 56.0)] == [4, 0, UNLIMITED]


@pytest.mark.rule("LAMINA-12")
def test_the_slowest_pull_of_late_is_reckoned_with() -> None:
    gaps = Gaps(0.5, kept=2)
    speeds = []
    for size, seconds in ((10, 20.0), (10, 5.0), (4, 1.0)):
        gaps.took(size, seconds)
        speeds.append(gaps.byte_s)
    assert speeds == [2.0, 2.0, 0.5]
    gaps.byte_s = 0.0
    gaps.empty(1.0)
    gaps.message(2.0)
    gaps.empty(2.0)
    assert gaps.room(2.5) == UNLIMITED


@pytest.mark.rule("LAMINA-12")
def test_pieces_of_a_prompt() -> None:
    for layers, size in ((0, 8), (1, 0)):
        with pytest.raises(BadInput, match="at least 1 expected"):
            HandOff(layers, size)
    HandOff(1, 1)
    off = HandOff(2, 24)
    for bad in ((1, 5), (0, 0), (-1, 5), (2, 5)):
        with pytest.raises(IllegalEvent, match="out of order"):
            off.offer(7, bad[0], bad[1], 8)
    off.offer(7, 0, 5, 8, first=2)
    assert off.backlog == 40
    assert off.next_pull(23) is None and off.backlog == 40
    one = off.next_pull(24)
    assert one == (7, 0, 2, 3, 24) and off.backlog == 40 and off.next_pull(UNLIMITED) is None
    assert off.pulled() is None and off.backlog == 16
    assert off.next_pull(16) == (7, 0, 5, 2, 16) and off.pulled() is None
    with pytest.raises(IllegalEvent, match="nothing is being pulled"):
        off.pulled()
    off.offer(7, 1, 1, 30)
    with pytest.raises(IllegalEvent, match="layer 2 offered"):
        off.offer(7, 2, 1, 8)
    assert off.next_pull(29) is None and off.next_pull(30) == (7, 1, 0, 1, 30)
    assert off.pulled() == 7 and off.backlog == 0
    off.offer(7, 0, 1, 8)  # over: the number may come again
    off.offer(8, 0, 1, 8)
    assert off.next_pull(8) == (7, 0, 0, 1, 8)
    off.drop(7)
    assert off.backlog == 16 and off.pulled() is None, "what is under way still comes"
    assert off.next_pull(8) == (8, 0, 0, 1, 8)
    off.drop(9)  # what is under way is another's
    assert off.pulled() is None
    off.offer(8, 1, 1, 8)
    assert off.next_pull(8) is not None and off.pulled() == 8
    for layer in (0, 1):  # given up, and from the beginning
        off.offer(7, layer, 1, 8)
    assert [off.next_pull(8) and off.pulled() for _ in range(2)] == [None, 7]


@pytest.mark.rule("LAMINA-12")
def test_bounds_of_prefill_workers() -> None:
    for workers, held in ((-1, 2), (2, 0)):
        with pytest.raises(BadInput, match="at least 0 and 1 expected"):
            Prompts(workers, held)
    Prompts(0)
    prompts = Prompts(1, 1)
    prompts.wait(5)
    prompts.wait(6)
    assert prompts.start() == [(5, 0)] and prompts.start() == []
    prompts.made(0, 5)
    assert prompts.start() == [], "its keys and values are still there"
    prompts.drop(5)
    assert prompts.start() == [(6, 0)]


@pytest.mark.rule("LAMINA-25", "LAMINA-6")
def test_what_a_batch_does_not_do_does_not_end() -> None:
    rotation = Rotation(2, "rotation")
    for what in ("restart", "emptied", "slice_done", "token_done", "attention_done"):
        with pytest.raises(IllegalEvent, match=what):
            getattr(rotation, what)(1)
    rotation.opened(0)
    for what in ("opened", "slice_done", "token_done", "attention_done"):
        with pytest.raises(IllegalEvent, match=what):
            getattr(rotation, what)(0)
    assert [run.batch for run in rotation.next_runs()] == [0]
    for what in ("opened", "emptied", "attention_done"):
        with pytest.raises(IllegalEvent, match=what):
            getattr(rotation, what)(0)
    rotation.slice_done(0)
    for what in ("opened", "emptied", "slice_done", "token_done"):
        with pytest.raises(IllegalEvent, match=what):
            getattr(rotation, what)(0)


@pytest.mark.rule("LAMINA-12")
def test_what_did_not_happen_is_not_told_to_serving() -> None:
    o = ServingOptions(2, (2, 2))
    assert (o.batches, o.order, o.max_batch, o.chunk) == (1, "rotation", 32, 64)
    assert (o.devices, o.partition, o.blocks, o.kv_block, o.prefill) == (1, "head", 1024, 64, 0)
    s = Serving(ServingOptions(1, (1,), prefill=1))
    with pytest.raises(IllegalEvent, match=r"pulled\(0\)"):
        s.pulled(0)
    s.arrived(0, 2, 3)
    s.next_actions()
    s.prefilled(0, 0)
    s.pulled(0)
    with pytest.raises(IllegalEvent, match=r"pulled\(0\)"):
        s.pulled(0)
    assert s.next_actions()[-1].spans == (Span(0, 2, 3),)  # type: ignore[union-attr]
    with pytest.raises(IllegalEvent, match="token_done"):
        s.token_done(0)
    s.slice_done(0)
    s.attention_done(0)
    s.next_actions()
    with pytest.raises(IllegalEvent, match="ends with token_done"):
        s.slice_done(0)


@pytest.mark.rule("LAMINA-3")
def test_heads_are_shared_out_evenly_or_not_at_all() -> None:
    HeadPool(2, 8, (4, 2))
    with pytest.raises(BadInput, match="divides the 2, 4 KV heads: 1, 2"):
        HeadPool(4, 8, (4, 2))


@pytest.mark.rule("LAMINA-1", "LAMINA-5", "LAMINA-10")
def test_messages_and_their_bytes() -> None:
    protocol = Protocol()
    for tile, devices, first, end in ((0, (), 0, 1), (0, (0,), 1, 1), (0, (0,), -1, 1),
                                      (-1, (0,), 0, 1)):  # fmt: skip
        with pytest.raises(IllegalEvent, match="a new tile"):
            protocol.take(Opened(tile, devices, first, end))
    protocol.take(Opened(0, (0,), 0, 1))
    for rows, size in ((0, 4), (1, -1)):
        with pytest.raises(IllegalEvent, match="no message"):
            protocol.take(Sent("q", 0, 0, 0, rows, size))
    for kind in ("q", "kv", "a"):
        assert not protocol.quiet
        protocol.take(Sent(kind, 0, 0, 0, 1, 0))
    assert protocol.quiet and protocol.finished == 1
    wire = WireBytes([AttentionSpec("gqa", 4, 2, 8, 8, None, 1.0)] * 2, hidden=10)
    (layer, _) = wire.layers
    assert (layer.q, layer.kv, layer.a, layer.context) == (128, 128, 128, 40)
    assert [wire.context(3, batches) for batches in (1, 2, 3)] == [0, 0, 240]
    assert (wire.attention(3), wire.to_memory(3)) == (2304, 1536)


@pytest.mark.rule("LAMINA-8")
def test_a_batch_gives_away_only_what_evens_things_out() -> None:
    batches = Batches(2)
    for request, length in ((0, 5), (1, 5), (2, 5)):
        batches.members[0][request] = length
    batches.members[1][3] = 10
    assert [m.request for m in batches.level(0)] == [0], "two more, whatever the totals are"
    assert batches.level(0) == [] and batches.sizes() == [2, 2]
    batches = Batches(2)
    batches.members[0].update({0: 4, 1: 6})
    batches.members[1][2] = 2
    assert [m.request for m in batches.level(0)] == [0], "8 apart, then 0"
    batches = Batches(2)
    batches.members[0].update({0: 8, 1: 9})
    batches.members[1][2] = 9
    assert batches.level(0) == [], "8 apart, and 8 the other way: no closer"


@pytest.mark.rule("LAMINA-4")
def test_the_longest_first_evens_out() -> None:
    assert longest_first((1, 7, 3, 5), 2) == [8, 8]
    assert longest_first((9, 2, 2), 2) == [9, 4] and longest_first((), 2) == [0, 0]
    assert imbalance((9, 4)) == 18 / 13 and imbalance((0, 0)) == 1.0


@pytest.mark.rule("LAMINA-25")
def test_who_was_given_up_keeps_the_first_reason_and_loses_nothing_for_others() -> None:
    s = Serving(ServingOptions(1, (1,), devices=1, blocks=4, kv_block=4))
    s.arrived(0, 2, 2)
    s.arrived(1, 2, 2)
    s.next_actions()
    s.cancelled(0, "error", "first")
    s.cancelled(0)
    s.slice_done(0)
    s.attention_done(0)
    s.next_actions()
    s.token_done(0)
    actions = s.next_actions()
    assert actions[0] == Finish(0, "error", "first")
    assert actions[-1].spans == (Span(1, 2, 3),)  # type: ignore[union-attr]


@pytest.mark.rule("LAMINA-3", "LAMINA-4", "LAMINA-8")
def test_of_nothing_nothing_is_made() -> None:
    for make in (
        lambda: Batches(0), lambda: Rotation(0), lambda: RequestPool(0, 4),
        lambda: Serving(ServingOptions(0, (1,))), lambda: Serving(ServingOptions(1, (1,), chunk=0)),
        lambda: Serving(ServingOptions(1, (1,), max_batch=0)),
        lambda: Serving(ServingOptions(1, (1,), kv_block=0)),
        lambda: Serving(ServingOptions(1, (1,), blocks=0)),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=r": 0; at least 1 expected"):
            make()
    assert Batches(1).sizes() == [0] and RequestPool(1, 1).fits(1)
    assert Serving(ServingOptions(1, (1,), 1, "queue", 1, 1, 1)).idle


@pytest.mark.rule("LAMINA-12", "LAMINA-8", "LAMINA-5")
def test_small_things_by_hand() -> None:
    off = HandOff(1, 3)
    off.offer(0, 0, 2, 8)  # a token is the least
    assert off.next_pull(8) == (0, 0, 0, 1, 8) and off.pulled() is None
    batches = Batches(2)
    assert [batches.join(0, 5), batches.join(1, 5), batches.join(2, 1)] == [0, 1, 0]
    batches.grow(0)
    assert batches.totals() == [7, 5] and batches.leave(2) == 0 and batches.leave(1) == 1
    spec = AttentionSpec("gqa", 4, 2, 8, 8, None, 1.0)
    wide = [WireBytes([spec], 10, kv).layers[0].kv for kv in ("f32", "bf16", "f16")]
    assert wide == [128, 64, 64]
    prompts = Prompts(1, 3)
    for request in (1, 2, 3):
        prompts.wait(request)
    assert prompts.start() == [(1, 0)]
    prompts.made(0, 1)
    assert prompts.start() == [(2, 0)]
    assert prompts.lost(0) == (1, 2) and prompts.start() == [(1, 0)]
    prompts.made(0, 1)
    assert prompts.lost(0) == (1,) and prompts.start() == [(1, 0)], "before those that came later"
    prompts.made(0, 1)
    assert prompts.start() == [(2, 0)]


@pytest.mark.rule("LAMINA-6")
def test_a_rotation_in_steady_state() -> None:
    steady = Steady(3, slice_s=2.0, attention_s=0.5, network_s=0.25)
    assert steady.period_s == 3.0 and steady.replicas_busy == 1.0 and steady.bubble_s == 0.0
    assert steady.pool_busy == 0.5
    assert steady.token_s(4, 0.5) == 12.5 and steady.tokens_per_s(4, 5, 0.5) == 15 / 12.5
    alone = Steady(1, 2.0, 0.5, 0.25)
    assert (alone.period_s, alone.replicas_busy, alone.bubble_s) == (2.75, 2 / 2.75, 0.75)
    assert Steady(3, 1.0, 4.0).period_s == 12.0
