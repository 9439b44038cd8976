"""Corners of the control of attention in another pool: gaps, hand-off, prompts, turns by hand."""

from __future__ import annotations

import pytest

from reference.control.attention_handoff import UNLIMITED, Gaps, HandOff
from reference.control.attention_partition import imbalance, longest_first
from reference.control.attention_prompts import Prompts
from reference.control.attention_rotation import Rotation
from reference.control.attention_serving import Serving, ServingOptions, Span
from reference.vocab.actions import Finish
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
    assert off.next_pull(29) is None and off.next_pull(30) == (7, 1, 0, 1, 30)
    assert off.pulled() == 7 and off.backlog == 0
    off.offer(7, 0, 1, 8)  # over: the number may come again
    off.offer(8, 0, 1, 8)
    assert off.next_pull(8) == (7, 0, 0, 1, 8)
    off.drop(7)
    assert off.backlog == 16 and off.pulled() is None, "what is under way still comes"
    off.drop(9)
    assert off.next_pull(8) == (8, 0, 0, 1, 8) and off.pulled() is None
    off.offer(8, 1, 1, 8)
    assert off.next_pull(8) is not None and off.pulled() == 8


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


@pytest.mark.rule("LAMINA-25")
def test_a_resting_batch_does_not_begin_again() -> None:
    rotation = Rotation(2, "rotation")
    with pytest.raises(IllegalEvent, match=r"restart\(1\)"):
        rotation.restart(1)


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
