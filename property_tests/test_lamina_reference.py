"""Lamina as specification: merge, partition, wire, rotation, batches, hand-off, in NumPy."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import turns
from oracle.tiny import tiny_config, write_checkpoint
from oracle.walks import pinned
from reference.attention_offload import merge as mg
from reference.attention_offload.devices import MemoryPool
from reference.attention_offload.handoff import PrefillWorker, decode_with_handoff
from reference.attention_offload.model import OffloadedModel
from reference.control.attention_batches import Batches
from reference.control.attention_handoff import UNLIMITED, Gaps, HandOff
from reference.control.attention_partition import (
    HeadPool,
    RequestPool,
    check_head_shares,
    head_share,
    imbalance,
    legal_head_shares,
    longest_first,
)
from reference.control.attention_prompts import Prompts
from reference.control.attention_rotation import (
    Rotation,
    Steady,
    context_moves,
    replica_of,
    replicas_of,
    slot_of,
)
from reference.control.attention_wire import (
    KINDS,
    Opened,
    Protocol,
    Sent,
    WireBytes,
    WireEvent,
    event_of,
    plain_of,
)
from reference.files.checkpoint import Checkpoint
from reference.numerics.model import Model
from reference.numerics.naive import naive_greedy, remembering, run_chunk
from reference.vocab.config import AttentionSpec
from reference.vocab.errors import BadInput, IllegalEvent

HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}


# Merge


@pytest.mark.rule("LAMINA-9")
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_any_split_gives_the_whole(size: float) -> None:
    """Every way to cut 6 positions into parts, the empty part among them, in any order."""
    draw = np.random.default_rng(0)
    q, k, v = draw.normal(size=(3, 4)), draw.normal(size=(6, 4)), draw.normal(size=(6, 5))
    q *= size  # scores up to about +-1e4
    want = mg.softmax_attention(q, k, v, 1.0)
    for colours in itertools.product(range(3), repeat=6):
        parts = [mg.part_of(q, k[np.equal(colours, c)], v[np.equal(colours, c)], 1.0)
                 for c in range(3)]
        for order in ((0, 1, 2), (2, 0, 1)):
            got = mg.merge_all([parts[i] for i in order], 3, 5)
            np.testing.assert_allclose(got.a, want, rtol=1e-12, atol=1e-12)


@pytest.mark.rule("LAMINA-9")
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sampled_from([1.0, 300.0]))
def test_many_parts_in_single_precision(sizes: list[int], scale: float) -> None:
    n = sum(sizes)
    if n == 0:
        got = mg.merge_all([mg.empty(2, 3)] * len(sizes), 2, 3)
        assert got.m.tolist() == [-np.inf] * 2 and not got.s.any() and not got.a.any()
        return
    draw = np.random.default_rng(n)
    q, k, v = (draw.normal(size=s).astype(np.float32) for s in ((2, 4), (n, 4), (n, 3)))
    cuts = np.cumsum([0, *sizes])
    parts = [mg.part_of(q, k[a:b], v[a:b], scale) for a, b in itertools.pairwise(cuts)]
    got = mg.merge_all(parts, 2, 3)
    want = mg.softmax_attention(*(x.astype(np.float64) for x in (q, k, v)), scale)
    # Scores are rounded to float32: an absolute error of about |s| eps in each exponent.
    bound = 1e-5 * max(1.0, np.abs(scale * (q @ k.T)).max() / 10)
    np.testing.assert_allclose(got.a, want, atol=bound)


@pytest.mark.rule("LAMINA-9")
def test_without_the_maximum_it_overflows() -> None:
    """The formula as it is printed: right for small scores, no number for large ones."""
    draw = np.random.default_rng(1)
    q, k, v = draw.normal(size=(1, 4)), draw.normal(size=(5, 4)), draw.normal(size=(5, 2))
    np.testing.assert_allclose(mg.unshifted(q, k, v, 1.0)[1], mg.softmax_attention(q, k, v, 1.0))
    assert not np.isfinite(mg.unshifted(q, k, v, 1e4)[1]).all()
    assert np.isfinite(mg.part_of(q, k, v, 1e4).a).all()


# Partition


@pytest.mark.rule("LAMINA-3")
def test_heads_are_shared_out_where_the_number_divides() -> None:
    """The paper's three models: 52, 64 and 8 KV heads."""
    assert legal_head_shares([52]) == (1, 2, 4, 13, 26, 52)
    assert legal_head_shares([64] * 80) == (1, 2, 4, 8, 16, 32, 64)
    assert legal_head_shares([8] * 80) == (1, 2, 4, 8)
    assert legal_head_shares([8, 4, 12]) == (1, 2, 4)
    for devices in (3, 5, 6, 16):
        with pytest.raises(BadInput, match="1, 2, 4, 8"):
            check_head_shares(devices, [8] * 80)
    shares = [head_share(i, 4, 8) for i in range(4)]
    assert sorted(h for s in shares for h in s) == list(range(8))
    assert imbalance([len(s) for s in shares]) == 1.0


@pytest.mark.rule("LAMINA-3", "LAMINA-4")
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60), st.integers(1, 4))
def test_no_device_ever_holds_more_than_it_can(asks: list[tuple[bool, int]], n: int) -> None:
    pools = [RequestPool(n, 20), HeadPool(n, 20, [12])]
    alive: list[list[int]] = [[], []]
    for number, (ends, blocks) in enumerate(asks):
        for pool, mine in zip(pools, alive, strict=True):
            if ends and mine:
                pool.drop(mine.pop(0))
            owners = pool.place(number, blocks)
            if owners is not None:
                mine.append(number)
                assert len(owners) == (1 if pool.kind == "request" else n)
            else:
                # Refused only when not one device has room (heads: all are equally full).
                assert min(pool.held()) + blocks > 20
            assert max(pool.held()) <= 20
            assert set(pool.lost(0)) <= set(mine)
    assert imbalance(pools[1].held()) == 1.0
    if alive[1]:
        assert set(pools[1].lost(n - 1)) == set(alive[1])
    assert sorted(r for d in range(n) for r in pools[0].lost(d)) == sorted(alive[0])
    assert not pools[0].fits(21) and pools[1].fits(20)


def test_longest_first_beats_taking_turns() -> None:
    lengths = [900, 800, 100, 100, 100, 100, 100, 800]
    turns = [sum(lengths[i::2]) for i in range(2)]
    assert imbalance(longest_first(lengths, 2)) <= imbalance(turns)
    assert imbalance(longest_first(lengths, 2)) < 1.07


# Wire


def spec(heads: int, kv_heads: int, d: int = 16, dv: int = 16) -> AttentionSpec:
    return AttentionSpec("gqa", heads, kv_heads, d, dv, None, 1.0)


@pytest.mark.rule("LAMINA-5", "LAMINA-10")
def test_the_formula_and_the_papers_special_case() -> None:
    for heads, kv_heads in HEADS.values():
        wire = WireBytes([spec(heads, kv_heads)] * 3, heads * 16, "bf16", 2, 2, 2)
        d, g = heads * 16, heads // kv_heads
        assert wire.attention(5) == 5 * 3 * (2 * d + 2 * d // g) * 2  # (2 + 2/G) e d
        assert wire.to_memory(5) * (2 + 2 / g) == wire.attention(5) * (1 + 2 / g)
        assert wire.context(5, 2) == 0 and wire.context(5, 4) == 5 * 3 * 2 * d
    assert WireBytes([spec(8, 2, 8, 4)], 1, "bf16").attention(1) == 4 * 64 + 2 * 2 * 12 + 4 * 32
    # Llama-3 70B, as tabulated from the paper: 36,864 bytes a token and layer.
    assert WireBytes([spec(64, 8, 128, 128)], 8192, "bf16", 2, 2).attention(1) == 36864
    # MLA, absorbed: queries as wide as the cached row, values the compressed part of it.
    mla = AttentionSpec("mla", 8, 8, 24, 16, None, 1.0, kv_rank=32, rope_dim=8, nope_dim=16)
    assert WireBytes([mla], 1, "bf16").attention(1) == 4 * 8 * 40 + 2 * 40 + 4 * 8 * 32


def talk(*words: str) -> None:
    protocol = Protocol()
    protocol.take(Opened(0, (0, 1), 3, 5))
    for word in words:
        kind, layer, device = word.split()
        protocol.take(Sent(kind, 0, int(layer), int(device), 1, 4))  # type: ignore[arg-type]


@pytest.mark.rule("LAMINA-1")
@pytest.mark.parametrize(
    "words",
    ["kv 3 0", "q 3 0,a 3 0", "q 3 0,q 3 0", "q 3 0,kv 3 0,a 3 0,a 3 0", "q 4 0", "q 3 2",
     "q 3 0,kv 3 0,a 3 0,q 4 0", "hello 3 0"],
)  # fmt: skip
def test_what_breaks_the_protocol_is_named(words: str) -> None:
    with pytest.raises(IllegalEvent):
        talk(*words.split(","))


@pytest.mark.rule("LAMINA-1")
def test_the_protocol_ends_when_all_have_answered() -> None:
    words = "q 3 0,q 3 1,kv 3 1,kv 3 0,a 3 0,a 3 1,q 4 0,kv 4 0,a 4 0,q 4 1,kv 4 1,a 4 1"
    protocol = Protocol()
    protocol.take(Opened(0, (0, 1), 3, 5))
    for word in words.split(","):
        assert not protocol.quiet
        kind, layer, device = word.split()
        protocol.take(Sent(kind, 0, int(layer), int(device), 1, 4))  # type: ignore[arg-type]
    assert protocol.quiet and protocol.finished == 1
    with pytest.raises(IllegalEvent):
        protocol.take(Opened(0, (0,), 0, 1))
    with pytest.raises(IllegalEvent):
        protocol.take(Sent("q", 0, 4, 0, 1, 4))


# The readable pools


@cache
def checkpoint(heads: str, family: str = "llama", **more: object) -> Checkpoint:
    import tempfile

    n, g = HEADS[heads]
    config = tiny_config(family, num_attention_heads=n, num_key_value_heads=g, head_dim=8,
                         hidden_size=32, num_hidden_layers=2, **more)
    return Checkpoint.open(write_checkpoint(Path(tempfile.mkdtemp()) / "m", config, seed=5))


@pytest.mark.rule("LAMINA-1", "LAMINA-2", "LAMINA-3", "LAMINA-5", "LAMINA-11", "LAMINA-13")
@pytest.mark.parametrize(
    ("heads", "family", "kind", "devices"),
    [("mha", "llama", "head", 8), ("mha", "mixtral", "head", 2), ("gqa", "llama", "head", 2),
     ("gqa", "mixtral", "request", 3), ("mqa", "llama", "request", 2), ("mqa", "llama", "head", 1)],
)  # fmt: skip
def test_offloaded_is_monolithic_in_numpy(heads: str, family: str, kind: str, devices: int) -> None:
    """Tokens, logits, bytes, the order of messages; three requests, two of them at once."""
    more = {"sliding_window": 5} if family == "mixtral" else {}
    ckpt = checkpoint(heads, family, **more)
    protocol, sent = Protocol(), []

    def record(event: Opened | Sent) -> None:
        protocol.take(event)
        sent.append(event)

    pool = MemoryPool(ckpt.config, devices, kind, kv_block=4, record=record)
    model, local = OffloadedModel(ckpt, kv_block=4).on(pool), Model(ckpt, kv_block=4)
    rows = 0
    for r in range(3):
        state, own = model.admit(r, 30), local.start()
        for tokens in ([3 + r, 17, 40, 9, 60, 33, 21], [8], [70], [5]):
            got = run_chunk(model, state, tokens, state.length, remembering(model))  # type: ignore[arg-type]
            want = run_chunk(local, own, tokens, own.length, remembering(local))
            assert got is not None and want is not None
            assert got.tobytes() == want.tobytes()
            rows += len(tokens)
        if r == 0:
            pool.drop(r)
    assert protocol.quiet
    wire = WireBytes([s.attention for s in ckpt.config.layers], ckpt.config.hidden)
    messages = [e for e in sent if isinstance(e, Sent)]
    assert sum(m.bytes for m in messages) == wire.attention(rows)
    assert sum(m.bytes for m in messages if m.kind != "a") == wire.to_memory(rows)
    if kind == "head":
        for d in range(devices):
            mine = sum(m.bytes for m in messages if m.device == d)
            assert mine * devices == wire.attention(rows)
    # The compute side keeps two integers and a tuple for a request; all KV is on the devices.
    assert not any(isinstance(x, np.ndarray) for x in vars(state).values())
    assert {k[0] for d in pool.devices for k in d.cached} == {1, 2}


@pytest.mark.rule("LAMINA-12")
@pytest.mark.parametrize(("kind", "room"), [("head", 700), ("request", 1500), ("head", 10**9)])
def test_pulled_prompts_give_the_same_tokens(kind: str, room: int) -> None:
    ckpt = checkpoint("gqa")
    sent: list[Sent] = []
    pool = MemoryPool(ckpt.config, 2, kind, kv_block=4,
                      record=lambda e: sent.append(e) if isinstance(e, Sent) else None)
    model = OffloadedModel(ckpt, kv_block=4).on(pool)
    handoff = HandOff(len(ckpt.config.layers), piece_bytes=600)
    worker = PrefillWorker(Model(ckpt, kv_block=4), handoff)
    prompts = [[5, 9, 31, 44, 2, 17, 80], [11, 12], [60, 7, 7, 8, 90, 33, 21, 22, 23, 24]]
    got = decode_with_handoff(worker, model, prompts, 6, room)
    assert got == [naive_greedy(ckpt, p, 6, kv_block=4) for p in prompts]
    each = sum(4 * a.kv_heads * (a.head_dim + a.v_head_dim)
               for a in (s.attention for s in ckpt.config.layers))
    pulls = [m for m in sent if m.kind == "pull"]
    assert sum(m.bytes for m in pulls) == each * sum(map(len, prompts))
    assert handoff.backlog == 0 and not worker.states
    first = next(i for i, m in enumerate(sent) if m.kind == "q")
    later = [m for m in sent[first:] if m.kind == "pull"]
    assert bool(later) == (room < 10**9)  # with small gaps the pulls mix with decoding


@pytest.mark.rule("LAMINA-12")
def test_a_piece_moves_only_where_it_fits() -> None:
    handoff = HandOff(2, piece_bytes=40)
    handoff.offer(7, 0, 5, 16)
    with pytest.raises(IllegalEvent):
        handoff.offer(7, 0, 5, 16)
    assert handoff.backlog == 80
    assert handoff.next_pull(31) is None
    piece = handoff.next_pull(32)
    assert piece is not None and (piece.first, piece.tokens, piece.bytes) == (0, 2, 32)
    assert handoff.next_pull(10**6) is None  # one at a time
    handoff.offer(7, 1, 5, 16)
    done = [handoff.pulled()]
    while handoff.next_pull(40):
        done.append(handoff.pulled())
    assert done == [None] * 5 + [7] and handoff.backlog == 0
    with pytest.raises(IllegalEvent):
        handoff.pulled()
    handoff.offer(8, 0, 3, 16)
    handoff.next_pull(40)
    handoff.drop(8)
    assert handoff.pulled() is None and handoff.backlog == 0


@pytest.mark.rule("LAMINA-12")
@given(
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30), st.floats(0.001, 0.2),
    st.integers(1, 40),
)
def test_a_pull_is_over_before_the_gaps_of_late_would_be(
    lengths: list[float], byte_s: float, size: int
) -> None:
    """Gaps of given lengths, each pulled into as far as there is room: what is let in is over
    within the shortest of the last eight gaps, and beyond four medians anything is."""
    gaps, now = Gaps(byte_s), 0.0
    assert gaps.room(now) == UNLIMITED  # nothing is known to come
    for n, length in enumerate(lengths):
        gaps.empty(now)
        at, known = now, lengths[max(0, n - 8) : n]
        while known and gaps.room(at) >= size:
            at += size * byte_s
            assert at <= now + min(known) + 1e-9
            gaps.took(size, size * byte_s)
        if known:
            assert at + size * byte_s > now + min(known) - byte_s - 1e-9  # no room was left unused
            rest = now + 4 * sorted(known)[len(known) // 2]
            assert gaps.room(rest - 1e-6) < UNLIMITED == gaps.room(rest + 1e-6)
            assert gaps.wait_s(at) == pytest.approx(rest - at)
        now += length
        gaps.message(now)
        now += 0.1
    gaps.empty(now, more=True)  # in the middle of a turn the next message is due at once
    assert gaps.room(now) == 0 and gaps.room(now + 100) == UNLIMITED
    before = min(lengths[-8:])
    gaps.message(now + 1e-3)
    gaps.empty(now + 1)  # and it tells nothing of the gaps between turns
    assert gaps.room(now + 1) == pytest.approx(before / gaps.byte_s, abs=1)
    gaps.took(1, 5.0)  # the slowest pull of late is what is reckoned with
    assert gaps.byte_s == 5.0


@pytest.mark.rule("LAMINA-12")
def test_a_worker_has_one_prompt_in_work_and_two_at_most() -> None:
    prompts = Prompts(2)
    for r in range(6):
        prompts.wait(r)
    assert prompts.start() == [(0, 0), (1, 1)] and prompts.start() == []
    prompts.made(0, 0)
    assert prompts.start() == [(2, 0)]
    prompts.made(0, 2)
    assert prompts.start() == []  # two are there, none of them pulled
    prompts.drop(0)
    assert prompts.start() == [(3, 0)]
    assert prompts.lost(0) == (2, 3) and prompts.start() == [(2, 0)]  # again, and where they were
    prompts.drop(1)  # given up while it runs: the worker is busy with it all the same
    assert prompts.start() == []
    with pytest.raises(IllegalEvent):
        prompts.made(1, 4)
    prompts.made(1, 1)
    assert prompts.start() == [(4, 1)]
    with pytest.raises(BadInput):
        Prompts(-1)


# Rotation


def play(n: int, slice_s: float, attention_s: float, network_s: float, turns: int,
         order: str = "rotation", slices: list[list[float]] | None = None) -> dict:
    """The state machine against durations: a small event loop with a first-come memory pool."""
    control = Rotation(n, order)  # type: ignore[arg-type]
    now, pool_free, due = 0.0, 0.0, []
    starts: dict[int, list[float]] = {j: [] for j in range(n)}
    busy: list[list[tuple[float, float]]] = [[] for _ in range(control.replicas)]
    pool: list[tuple[float, float]] = []
    replicas: dict[tuple[int, int], int] = {}
    for j in range(n):
        control.opened(j)
    while True:
        for run in control.next_runs():
            took = slices[run.batch][run.turn % len(slices[0])] if slices else slice_s
            busy[run.replica].append((now, now + took))
            starts[run.batch].append(now)
            replicas[run.batch, run.turn] = run.replica
            due.append((now + took, "slice", run.batch))
        if not due:
            return {"starts": starts, "busy": busy, "pool": pool, "replicas": replicas}
        due.sort()
        now, what, batch = due.pop(0)
        if what == "slice":
            control.slice_done(batch)
            if len(starts[batch]) < turns:
                begin = max(now, pool_free)
                pool_free = begin + attention_s
                pool.append((begin, pool_free))
                due.append((pool_free + network_s, "attention", batch))
            else:
                control.attention_done(batch)
                control.emptied(batch)
        else:
            control.attention_done(batch)


@pytest.mark.rule("LAMINA-6")
@pytest.mark.parametrize("n", range(2, 9))
def test_the_rotation_has_no_bubble_at_its_design_point(n: int) -> None:
    """t_a = t_m / (n - 1): every slot used, none twice, replica (j + k) mod (n - 1)."""
    r = replicas_of(n)
    slots = [slot_of(j, k, n) for k in range(40) for j in range(n)]
    assert slots == list(range(40 * n))
    assert all(s % r == replica_of(j, k, n)
               for s, (k, j) in enumerate(itertools.product(range(40), range(n))))
    ran = play(n, slice_s=float(r), attention_s=1.0, network_s=0.0, turns=40)
    assert all(rep == replica_of(j, k, n) for (j, k), rep in ran["replicas"].items())
    middle = slice(5, 30)
    for intervals in [*ran["busy"], ran["pool"]]:
        ends = [e for _, e in intervals[middle]]
        begins = [b for b, _ in intervals[middle]]
        assert begins[1:] == ends[:-1]  # neither conflict nor gap
    steady = Steady(n, r, 1.0)
    assert steady.period_s == n and steady.bubble_s == 0
    assert steady.replicas_busy == steady.pool_busy == 1.0
    for starts in ran["starts"].values():
        assert {b - a for a, b in itertools.pairwise(starts[5:35])} == {steady.period_s}
    assert context_moves(n) == (n > 2)


@pytest.mark.rule("LAMINA-6")
@pytest.mark.parametrize("order", ["rotation", "queue"])
@given(n=st.integers(1, 6), m=st.integers(1, 12), a=st.integers(1, 12), net=st.integers(0, 6))
def test_off_the_design_point_the_period_is_the_formula(
    order: str, n: int, m: int, a: int, net: int
) -> None:
    ran = play(n, m, a, net, 60, order)
    steady = Steady(n, m, a, net)
    for starts in ran["starts"].values():
        mean = (starts[50] - starts[20]) / 30
        assert mean == pytest.approx(steady.period_s, rel=0.03), (mean, steady)
    if n == 2 and m == a:
        assert steady.bubble_s == net  # what is not hidden opens a bubble of just that
    assert steady.tokens_per_s(10, 4) == pytest.approx(n * 4 / (10 * steady.period_s))


@pytest.mark.rule("LAMINA-7")
def test_queues_beat_the_rotation_when_slices_vary() -> None:
    """Slices that take 1, or at times 5: the rotation waits for the late one, a queue does not."""
    rng = Random(3)
    times = [[rng.choice([1.0, 1.0, 1.0, 5.0]) for _ in range(200)] for _ in range(4)]
    end = {order: max(s[-1] for s in play(4, 0, 0.5, 0.0, 200, order, times)["starts"].values())
           for order in ("rotation", "queue")}
    work = sum(map(sum, times)) / 3
    assert work <= end["queue"] + 20 < end["rotation"]
    assert end["queue"] < 0.9 * end["rotation"], end
    even = [[1.5] * 200 for _ in range(4)]
    same = {order: max(s[-1] for s in play(4, 0, 0.5, 0.0, 200, order, even)["starts"].values())
            for order in ("rotation", "queue")}
    assert same["queue"] == pytest.approx(same["rotation"], rel=0.01)


@pytest.mark.rule("LAMINA-6", "LAMINA-7")
@given(st.data())
def test_the_rotation_never_comes_to_a_stop(data: st.DataObject) -> None:
    """Batches that open and empty at any time: something can always go on."""
    n = data.draw(st.integers(1, 5))
    control = Rotation(n, data.draw(st.sampled_from(["rotation", "queue"])))  # type: ignore[arg-type]
    running: list[int] = []
    away: list[int] = []
    for _ in range(data.draw(st.integers(1, 60))):
        for run in control.next_runs():
            assert run.batch not in running and run.batch not in away
            assert 0 <= run.replica < control.replicas
            running.append(run.batch)
        idle = [j for j in range(n) if control.state[j] == 0]
        ready = list(control.ready)
        options = [("done", j) for j in running] + [("back", j) for j in away]
        assert options or not ready, "ready batches, and nothing that will wake them"
        options += [("open", j) for j in idle] + [("empty", j) for j in ready]
        what, j = data.draw(st.sampled_from(sorted(options)))
        if what == "done":
            running.remove(j)
            away.append(j)
            control.slice_done(j)
        elif what == "back":
            away.remove(j)
            control.attention_done(j)
        elif what == "open":
            control.opened(j)
        else:
            control.emptied(j)
    with pytest.raises(IllegalEvent):
        control.slice_done(-1)
    with pytest.raises(BadInput):
        Rotation(0)
    with pytest.raises(BadInput):
        Rotation(2, "random")  # type: ignore[arg-type]


# Batches


@pytest.mark.rule("LAMINA-8")
@given(st.integers(1, 4), st.integers(0, 10**6))
def test_batches_stay_even(n: int, seed: int) -> None:
    """Requests come, grow and go. Once every batch has been levelled, sizes differ by at most
    one, and no single move would bring two totals closer."""
    rng, batches, alive = Random(seed), Batches(n), {}
    for number in range(40):
        if alive and rng.random() < 0.4:
            batches.leave(gone := rng.choice(sorted(alive)))
            del alive[gone]
        alive[number] = length = rng.choice([10, 20, 500, rng.randrange(1, 4000)])
        batches.join(number, length)
        for r in list(alive):
            batches.grow(r)
            alive[r] += 1
        for _ in range(3):
            for j in rng.sample(range(n), n):
                before = batches.sizes()[j], batches.totals()[j]
                for move in batches.level(j):
                    assert move.source == j and batches.batch_of(move.request) != j
                assert (batches.sizes()[j], batches.totals()[j]) <= before
    assert {r: x for m in batches.members for r, x in m.items()} == alive
    sizes, totals = batches.sizes(), batches.totals()
    assert max(sizes) - min(sizes) <= 1
    for j, k in itertools.permutations(range(n), 2):
        if sizes[j] > sizes[k]:
            gap = totals[j] - totals[k]
            target = min((i for i in range(n) if sizes[i] < sizes[j]),
                         key=lambda i: (sizes[i], totals[i], i))
            if k == target:
                assert all(abs(gap - 2 * x) >= abs(gap) for x in batches.members[j].values())
    with pytest.raises(KeyError):
        batches.leave(10**9)


@pytest.mark.rule("LAMINA-8")
def test_a_newcomer_goes_where_least_is() -> None:
    batches = Batches(3)
    assert [batches.join(r, x) for r, x in enumerate([50, 40, 30, 5, 5, 5])] == [0, 1, 2, 2, 1, 0]
    assert [m.request for m in batches.level(0)] == []
    for r in (1, 2, 3, 4):
        batches.leave(r)
    assert batches.sizes() == [2, 0, 0]
    moves = batches.level(0)
    assert [(m.request, m.target) for m in moves] == [(5, 1)] or moves[0].source == 0
    assert max(batches.sizes()) == 1


# -- random plays ------------------------------------------------------------------------------


@pytest.mark.rule("LAMINA-4", "LAMINA-7", "LAMINA-12", "LAMINA-25")
def test_random_plays_decide_as_pinned() -> None:
    """Every order of what happens, cancels and losses: nothing legal is refused, each play ends,
    and no decision is another one than before."""
    plays = [turns.play(seed) for seed in range(turns.PLAYS)]
    assert [p for p in plays if p.fault] == []
    assert [p.seed for p, d in zip(plays, pinned("plays"), strict=True) if p.digest != d] == []
    drawn = [turns.draw_options(Random(f"play {seed}")) for seed in range(turns.PLAYS)]
    for what in ("order", "partition", "prefill", "batches", "devices"):
        assert len({getattr(o, what) for o in drawn}) > 1


@pytest.mark.rule("LAMINA-1")
def test_messages_come_back_from_a_log_as_they_were() -> None:
    events: list[WireEvent] = [Opened(3, (0, 2), 1, 4)]
    events += [Sent(kind, 5, 1, 2, 3, 40) for kind in KINDS]
    for event in events:
        assert event_of(plain_of(event)) == event
    for bad in ([], ["q", 1], ["q", 1, 2, 3, 4, None], ["open", 1, 2, 3, 4], ["open", 1, [0]]):
        with pytest.raises(ValueError, match="no message of the wire"):
            event_of(bad)
