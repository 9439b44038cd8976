"""Routes and arrivals: the synthetic router beside what was measured, recorded traces, refusals."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_impl.app.main import main
from reference.files.routing_trace import (
    Recorded,
    RoutingTrace,
    read_trace,
    trace_of_records,
    write_trace,
)
from reference.simulator import models, platforms
from reference.simulator.arrivals import Arrival, read_arrivals
from reference.simulator.costs import CostModel
from reference.simulator.frequencies import FrequencyRouter, read_counts
from reference.simulator.models import ModelShape
from reference.simulator.routes import RecordedRoutes, RoutesOf
from reference.simulator.run import control, routes_for, simulate
from reference.simulator.synthetic import (
    RouterShares,
    SyntheticRouter,
    correlation,
    deepseek_v2_lite_shares,
    overlap,
    qwen3_shares,
    top,
    uniform_shares,
)
from reference.simulator.traits import cache_hits, distinct, kept, top_share
from reference.simulator.traits import overlap as shared
from reference.vocab.errors import BadInput

TRACES = Path(__file__).parents[2] / "shared" / "traces"


# The synthetic router


@pytest.mark.rule("SIM-9")
def test_deepseek_v2_lite_beside_the_measured_statistics() -> None:
    """Measured on 260 prompts: kept at lags 1, 2, 4, 8, 32; hits and full hits of eight requests
    with LRU a layer at half and three quarters of the experts; experts of a step."""
    router = SyntheticRouter(deepseek_v2_lite_shares(6), 64, 6)
    requests = [router.request(n, 200) for n in range(32)]
    lags = [np.mean([kept(r, d) for r in requests[:8]]) for d in (1, 2, 4, 8, 32)]
    assert lags == pytest.approx([0.260, 0.200, 0.172, 0.158, 0.147], abs=0.02)
    assert shared(requests[0], requests[1]) == pytest.approx(0.098, abs=0.02)
    measured = {2: 11.4, 4: 20.7, 8: 34.3, 16: 49.8, 32: 60.6}
    for together, experts in measured.items():
        assert distinct(requests[:together]) == pytest.approx(experts, rel=0.04)
    for slots, (hit, full) in {32: (0.576, 0.058), 48: (0.815, 0.321)}.items():
        got = cache_hits(requests[:8], slots)
        assert got[0] == pytest.approx(hit, abs=0.03)
        assert got[1] == pytest.approx(full, abs=0.05)


@pytest.mark.rule("SIM-9")
def test_qwen3_beside_the_measured_statistics() -> None:
    """Measured: experts of a step, kept from token to token, LRU of one request by slots a layer,
    misses of eight requests with 51 slots by LRU, LFU and Belady."""
    router = SyntheticRouter(qwen3_shares(), 128, 8)
    requests = [router.request(n, 150) for n in range(16)]
    assert np.mean([kept(r, 1) for r in requests[:4]]) == pytest.approx(0.44, abs=0.03)
    assert shared(requests[0], requests[1]) == pytest.approx(0.143, abs=0.02)
    for together, experts in {2: 15.0, 4: 26.6, 8: 42.6, 16: 59.2}.items():
        assert distinct(requests[:together]) == pytest.approx(experts, rel=0.07)
    some = [r[:, ::4] for r in requests]
    for slots, hit in {8: 0.424, 16: 0.647, 32: 0.810, 64: 0.918}.items():
        got = np.mean([cache_hits([r], slots)[0] for r in some[:2]])
        assert got == pytest.approx(hit, abs=0.10 if slots == 16 else 0.07)
    for policy, misses in {"lru": 0.193, "lfu": 0.191, "belady": 0.099}.items():
        assert cache_hits(some[:8], 51, policy)[2] == pytest.approx(misses, abs=0.03)  # type: ignore[arg-type]


@pytest.mark.rule("SIM-9")
def test_overlap_is_what_the_routes_have() -> None:
    for c in (0.0, 0.3, 0.8):
        router = SyntheticRouter((RouterShares(c, 0.0, 0.0, 0.0),) * 200, 32, 4)
        a, b = router.request(0, 20), router.request(1, 20)
        assert shared(a, b) == pytest.approx(overlap(c, 32, 4), abs=0.03)
    assert overlap(0.0, 64, 8) == pytest.approx(0.125, abs=1e-3)
    assert overlap(1.0, 64, 8) == 1.0
    for kept_ in (0.2, 0.5, 0.9):
        assert overlap(correlation(kept_, 64, 8), 64, 8) == pytest.approx(kept_, abs=1e-3)
    assert correlation(0.01, 64, 8) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.rule("SIM-9")
def test_routes_depend_on_seed_and_number_alone() -> None:
    router = SyntheticRouter(uniform_shares(3), 16, 3, seed=5)
    one = router.request(7, 70)
    assert (SyntheticRouter(uniform_shares(3), 16, 3, seed=5).request(7, 40) == one[:40]).all()
    assert (SyntheticRouter(uniform_shares(3), 16, 3, seed=6).request(7, 70) != one).any()
    assert (router.request(8, 70) != one).any()
    assert one.shape == (70, 3, 3)
    assert all(len(set(x)) == 3 for x in one.reshape(-1, 3).tolist())
    score = np.array([0.5, 2.0, 1.0, 2.0, 0.0])
    assert top(score, 3).tolist() == [1, 3, 2]


@pytest.mark.rule("SIM-9")
def test_counted_frequencies_come_back(tmp_path: Path) -> None:
    """Sixteen experts, four a token: each is chosen as often as counted, in its domain; the last
    can be chosen by every token and no more often."""
    flat, steep = np.full(16, 100), np.arange(1, 17) ** 2
    with open(tmp_path / "c.npz", "wb") as file:
        np.savez(file, **{"a/counts": np.stack([flat, steep]), "b/counts": np.stack([steep, flat]),
                          "a/cross": np.zeros(3)})  # fmt: skip
    counts = read_counts(tmp_path / "c.npz")
    router = FrequencyRouter(counts, 3, 4, seed=2)
    assert router.domains == ("a", "b")
    first, second = (flat, flat, steep), (steep, steep, flat)
    for n, wanted in enumerate((first, second, first)):
        topk = router.request(n, 4000)
        assert topk.shape == (4000, 3, 4)
        assert all(len(set(x)) == 4 for x in topk[:50].reshape(-1, 4).tolist())
        for layer, row in enumerate(wanted):
            seen = np.bincount(topk[:, layer].ravel(), minlength=16)[router.names[layer]]
            assert np.abs(seen / seen.sum() - row / row.sum()).sum() < 0.06
    again = FrequencyRouter(counts, 3, 4, seed=2)
    assert (again.request(1, 50) == router.request(1, 4000)[:50]).all()


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"a/cross": np.zeros((2, 2), int)}, "no array '<domain>/counts'"),
        ({"a/counts": np.zeros((2, 2))}, "a/counts: float64 [2, 2]; counts [layers, experts]"),
        ({"a/counts": np.zeros((2, 2), int)}, "a layer without any choice"),
        ({"a/counts": -np.ones((2, 2), int)}, "counts [layers, experts]"),
    ],
)
def test_bad_counts_are_refused(arrays: dict[str, Any], told: str, tmp_path: Path) -> None:
    with open(tmp_path / "c.npz", "wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(BadInput) as refused:
        read_counts(tmp_path / "c.npz")
    assert told in str(refused.value)
    with pytest.raises(BadInput, match="No such file"):
        read_counts(tmp_path / "none.npz")


def test_the_domains_of_olmoe_are_as_skewed_as_counted() -> None:
    """The most used quarter of a layer's experts takes, by counts, so much of each domain."""
    file = TRACES / "routing-stats-olmoe/olmoe.npz"
    if not file.exists():
        pytest.skip(f"{file.name} is not here")
    counts = read_counts(file)
    router = FrequencyRouter({d: counts[d] for d in ("arxiv", "c4")}, 3, 8)
    for n, wanted in enumerate(((0.47, 0.65, 0.66), (0.34, 0.38, 0.42))):
        topk = router.request(n, 1000)
        got = [top_share(topk[:, layer : layer + 1], 64, 0.25) for layer in range(3)]
        assert got == pytest.approx(wanted, abs=0.03)


def test_traits_by_hand() -> None:
    one = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[0, 3]]])
    assert kept(one, 1) == pytest.approx((0.5 + 1 + 0) / 3)
    assert distinct([one, one + 1]) == pytest.approx((3 + 3 + 3 + 4) / 4)
    assert top_share(one, 4, 0.25) == pytest.approx(3 / 8)
    # Two slots: 0,1 miss; 1 hits; 1,2 hit; 0,3 miss.
    assert cache_hits([one], 2) == pytest.approx((3 / 8, 1 / 4, 5 / 8))
    # Three slots, LRU: 0 was given up for 2? No: three fit. 0 hits, 3 misses.
    assert cache_hits([one], 3) == pytest.approx((4 / 8, 1 / 4, 4 / 8))
    many = np.array([[[0]], [[1]], [[2]], [[0]]])
    assert cache_hits([many], 2)[2] == 1.0
    assert cache_hits([many], 2, "belady")[2] == 0.75
    twice = np.array([[[0]], [[0]], [[1]], [[2]], [[0]]])
    assert cache_hits([twice], 2, "lfu")[2] == 0.6
    assert cache_hits([twice], 2, "lru")[2] == 0.8


def test_every_model_has_routes_of_its_size() -> None:
    for name in models.names():
        model = models.load(name)
        got = routes_for(model).request(0, 3)
        assert got.shape == (3, len(model.moe_layers), model.top_k)
        assert got.max() < model.experts


# Recorded routes


def trace(**changes: Any) -> RoutingTrace:
    rng = np.random.default_rng(1)
    topk = rng.permuted(np.tile(np.arange(5, dtype=np.uint16), (6, 3, 1)), axis=-1)[..., :2]
    return RoutingTrace("m", 5, 2, (1, 2, 4), (10, 10, 12), (
        Recorded("a", 2, topk), Recorded("b", 4, topk[:4, ::-1])))  # fmt: skip


def written(path: Path, **arrays: Any) -> Path:
    """A trace with some of its arrays replaced; None leaves one out; `header` changes fields."""
    file = io.BytesIO()
    write_trace(file, trace())
    file.seek(0)
    with np.load(file) as held:
        parts = {name: held[name] for name in held.files}
    header = json.loads(parts["header"].tobytes()) | arrays.pop("header", {})
    parts["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    parts |= arrays
    with open(path, "wb") as out:
        np.savez(out, allow_pickle=True, **{k: v for k, v in parts.items() if v is not None})
    return path


@pytest.mark.rule("TRACE-1")
def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    with open(tmp_path / "t.npz", "wb") as file:
        write_trace(file, trace())
    got = read_trace(tmp_path / "t.npz")
    assert (got.model, got.experts, got.top_k, got.layers, got.expert_bytes) == (
        "m", 5, 2, (1, 2, 4), (10, 10, 12))  # fmt: skip
    for ours, theirs in zip(got.requests, trace().requests, strict=True):
        assert (ours.id, ours.prompt_len) == (theirs.id, theirs.prompt_len)
        assert ours.topk.dtype == np.uint16
        assert (ours.topk == theirs.topk).all()
    assert [r.topk.tolist() for r in read_trace(written(tmp_path / "u.npz")).requests] == [
        r.topk.tolist() for r in trace().requests]  # fmt: skip


@pytest.mark.rule("TRACE-2")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"header": {"format": "routes"}}, 'header.format: routes; "covey-routes-1" expected'),
        ({"header": {"model": 3}}, "header.model: 3"),
        ({"header": {"experts": 0}}, "header.experts: 0"),
        ({"header": {"experts": True}}, "header.experts: True"),
        ({"header": {"experts": 4}}, "topk/0: expert 4; below 4 expected"),
        ({"header": {"k": 6}}, "header.k: 6; 1 to 5 expected"),
        ({"header": {"k": 3}}, "topk/0: shape [6, 3, 2]; [6, 3, 3] expected"),
        ({"header": {"layers": [1, 1, 2]}}, "header.layers: "),
        ({"header": {"layers": []}}, "header.layers: []; ascending layer numbers"),
        ({"header": {"expert_bytes": [1, 2]}}, "header.expert_bytes: [1, 2]; a size a layer"),
        ({"header": {"requests": {}}}, "header.requests: {}; an array"),
        ({"header": {"requests": [{"id": "a", "prompt_len": 7, "tokens": 6}]}},
         "id, prompt_len and tokens"),
        ({"header": {"requests": [{"id": "a", "prompt_len": 0, "tokens": 1 << 40}]}},
         "bytes of routes; at most"),
        ({"topk/1": None}, "topk/1 is missing"),
        ({"topk/1": np.zeros((4, 3, 2), np.float32)}, "topk/1: float32; uint8 or uint16"),
        ({"topk/1": np.zeros((4, 3, 2), np.uint8)}, "topk/1: an expert twice for one token"),
        ({"topk/1": np.array([{}], object)}, "topk/1: object"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_by_field(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as refused:
        read_trace(written(tmp_path / "t.npz", **changes))
    assert told in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.rule("TRACE-2")
def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    """Any byte of the packed arrays and of the directory, changed: never another exception."""
    rng = np.random.default_rng(0)
    rows = [Recorded("a", 3, np.argsort(rng.random((50, 3, 16)))[..., :4].astype(np.uint16))]
    trace_path, counts_path = tmp_path / "t.npz", tmp_path / "c.npz"
    with open(trace_path, "wb") as file:
        write_trace(file, RoutingTrace("m", 16, 4, (0, 1, 2), (9, 9, 9), tuple(rows)))
    arrays: dict[str, Any] = {"a/counts": rng.integers(1, 99, (10, 60))}
    np.savez_compressed(counts_path, **arrays)
    for path, read in ((trace_path, read_trace), (counts_path, read_counts)):
        whole, refused = path.read_bytes(), list[str]()
        for at in range(0, len(whole), max(1, len(whole) // 400)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5B]) + whole[at + 1 :])
            try:
                read(path)
            except BadInput as error:
                refused.append(str(error))
        assert len(refused) > 200
        assert all(r.startswith(f"{path}: ") and "\n" not in r for r in refused)


def _other(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, x=np.zeros(3))


@pytest.mark.rule("TRACE-2")
def test_what_is_no_trace_at_all(tmp_path: Path) -> None:
    cases: dict[str, tuple[Callable[[Path], Any], str]] = {
        "nothing": (lambda p: None, "No such file"),
        "empty": (lambda p: p.write_bytes(b""), "no routing trace"),
        "binary": (lambda p: p.write_bytes(b"\x80\x81\x82\x83"), "neither npz nor text"),
        "cut": (lambda p: p.write_bytes(written(p).read_bytes()[:300]), "not a zip file"),
        "other": (_other, "no 'header' in it"),
        "text": (lambda p: p.write_text("a,b\n1,2\n"), ":1: columns a,b"),
        "row": (lambda p: p.write_text(CSV + "0,1,x,0,0,1,.5\n"), "is no row of a route trace"),
        "head": (lambda p: p.write_text(CSV.split("\n", 1)[1]), "n_layer, n_expert"),
        "short": (lambda p: p.write_text(CSV), "no token of which all 2 layers are there"),
    }
    for name, (make, told) in cases.items():
        path = tmp_path / name
        make(path)
        with pytest.raises(BadInput) as refused:
            read_trace(path)
        assert told in str(refused.value), name


CSV = """# model=x arch=y n_layer=2 n_expert=4 n_expert_used=1
# layer=0 expert_bytes=10 dense_bytes=1
# layer=1 expert_bytes=12 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.5,0,10
"""


@pytest.mark.rule("TRACE-2")
def test_a_bigmoeonedge_trace_by_hand(tmp_path: Path) -> None:
    """The first token never reached the last layer's router; the second did, and the third."""
    rows = "0,0,1,0,0,2,1,0,0\n0,0,1,1,0,1,1,0,0\n0,1,2,0,0,0,1,0,0\n0,1,2,1,0,3,1,0,0\n"
    (tmp_path / "x.route.csv").write_text(CSV + rows)
    got = read_trace(tmp_path / "x.route.csv")
    assert (got.model, got.experts, got.top_k, got.expert_bytes) == ("x", 4, 1, (10, 12))
    (one,) = got.requests
    assert one.prompt_len == 1
    assert one.topk.tolist() == [[[2], [1]], [[0], [3]]]


@pytest.mark.rule("SIM-9")
@pytest.mark.parametrize(
    ("name", "k", "layers", "lags", "hits"),
    [
        ("qwen", 6, 48, (0.380, 0.289, 0.277), {16: (0.617, 0.124), 32: (0.831, 0.447)}),
        ("gemma", 6, 30, (0.357, 0.293, 0.284), {32: (0.796, 0.339)}),
        ("gptoss", 2, 36, (0.179, 0.210, 0.134), {8: (0.500, 0.293)}),
    ],
)
def test_published_traces_have_their_known_statistics(
    name: str, k: int, layers: int, lags: tuple[float, ...], hits: dict[int, tuple[float, float]]
) -> None:
    file = TRACES / f"routing/bigmoeonedge/{name}.route.csv"
    if not file.exists():
        pytest.skip(f"{file.name} is not here")
    got = read_trace(file)
    assert (got.top_k, len(got.layers), got.experts) == (k, layers, 128)
    (one,) = got.requests
    decoded = one.topk[one.prompt_len :]
    assert [kept(decoded, d) for d in (1, 2, 4)] == pytest.approx(lags, abs=6e-4)
    for slots, wanted in hits.items():
        assert cache_hits([decoded], slots)[:2] == pytest.approx(wanted, abs=0.045)


@pytest.mark.rule("TRACE-3")
def test_the_routing_of_an_event_log() -> None:
    records: list[dict[str, Any]] = [
        {"event": "Arrived", "request": 0, "prompt_len": 3, "max_new_tokens": 2, "id": "first"},
        {"event": "Arrived", "request": 1, "prompt_len": 1, "max_new_tokens": 2},
        {"event": "Arrived", "request": 2, "prompt_len": 1, "max_new_tokens": 2},
        {"event": "Routed", "visit": [0, 0, 3], "experts": [[1, 2], [2, 3]]},
        {"event": "Routed", "visit": [1, 0, 3], "experts": [[0, 1]]},
        {"event": "Routed", "visit": [0, 0, 5], "experts": [[3, 2], [1, 3]]},
        {"action": "Load", "ticket": 1},
        {"event": "Routed", "visit": [0, 1, 3], "experts": [[0, 3]]},
        {"event": "Routed", "visit": [0, 1, 5], "experts": [[2, 0]]},
        {"event": "Routed", "visit": [0, 2, 3], "experts": [[1, 0]]},
    ]
    got = trace_of_records(records, "m", 4, 2, (3, 5), 7)
    assert (got.layers, got.expert_bytes) == ((3, 5), (7, 7))
    (one,) = got.requests  # the second ended before its second layer, the third before any
    assert (one.id, one.prompt_len) == ("first", 3)
    assert one.topk.tolist() == [[[1, 2], [3, 2]], [[2, 3], [1, 3]], [[0, 3], [2, 0]]]


@pytest.mark.rule("TRACE-4")
def test_a_models_own_routing_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded under two budgets by either engine: the same file; prompts and chunks included."""
    (tmp_path / "f").write_text(
        '{"id": "a", "prompt": [1, 5, 7], "max_new_tokens": 5}\n'
        '{"id": "b", "prompt": [3, 5, 9, 200, 44, 2], "max_new_tokens": 1}\n')
    base = ["trace", "record", "demo", "--requests", str(tmp_path / "f"), "--ignore-eos", "--quiet"]
    files = []
    for engine in (["--memory", "30%", "--chunk", "2"], ["--engine", "reference"]):
        files.append(tmp_path / f"{len(files)}.npz")
        assert main([*base, "-o", str(files[-1]), *engine]) == 0
    assert "2 requests, 13 tokens, 6 layers of 32 experts, 4 a token" in capsys.readouterr().out
    ours, theirs = map(read_trace, files)
    assert [(r.id, r.prompt_len, len(r.topk)) for r in ours.requests] == [
        ("a", 3, 7), ("b", 6, 6)]  # fmt: skip
    for a, b in zip(ours.requests, theirs.requests, strict=True):
        assert (a.topk == b.topk).all()
    assert main(["trace", "show", str(files[0]), "--json", str(tmp_path / "out")]) == 0
    shown = json.loads((tmp_path / "out").read_text())
    texts = [r.topk[r.prompt_len :] for r in ours.requests if len(r.topk) - r.prompt_len > 1]
    assert shown["kept from the token so many before"]["1"] == pytest.approx(kept(texts[0], 1))
    assert shown["hits, LRU a layer, 1 in step"]["50.0%"] == pytest.approx(
        cache_hits(texts, 16)[0])  # fmt: skip
    capsys.readouterr()
    assert main(["trace", "show", str(tmp_path / "f")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([*base, "-o", str(tmp_path / "f")]) == 2
    assert "--out" in capsys.readouterr().err
    if Path("/dev/full").exists():
        assert main([*base, "-o", "/dev/full"]) == 1
        error = capsys.readouterr().err
        assert error.endswith("covey trace: --out: /dev/full: No space left on device\n")


def test_recorded_routes_in_the_simulator() -> None:
    source = RecordedRoutes(trace(), shift=1)
    a, b = (r.topk for r in trace().requests)
    assert (source.request(0, 8) == np.concatenate([a, a[:2]])).all()
    assert (source.request(1, 3) == b[:3]).all()
    assert (source.request(2, 3) == a[1:4]).all()
    routes = RoutesOf(source, (1, 2, 4), lambda n: (2, 2))
    assert routes(0, 1, 4) == tuple(a[1, 2].tolist())
    routes.forget(0)
    assert routes.made == {}
    model = ModelShape("m", "m", (), (1, 2, 4), 5, 2, 1, {"own": 10}, 1)
    got = simulate(None, model, source, control(model, 0.5, 2), requests=2, tokens=20, warm_up=4,
                   costs=CostModel())  # fmt: skip
    assert got.tokens >= 20
    assert got.fetches_per_token > 0


def test_routes_are_made_as_far_as_a_request_has_come() -> None:
    """Not all of a long one at once; what comes later goes on where the first ended."""
    asked: list[int] = []

    class Told(SyntheticRouter):
        def request(self, request: int, tokens: int) -> np.ndarray:
            asked.append(tokens)
            return super().request(request, tokens)

    shares = (RouterShares(0.2, 0.2, 0.2, 0.5),) * 2
    routes = RoutesOf(Told(shares, 8, 2), (0, 1), lambda n: (1, 10**9))
    whole = SyntheticRouter(shares, 8, 2).request(3, 700)
    assert [routes(3, t, 1) for t in range(700)] == [tuple(x) for x in whole[:, 1].tolist()]
    assert asked == [256, 512, 1024]
    assert routes(4, 600, 0) and asked[-1] == 601


# Arrivals


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.9951690,396,109\n" \
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:51.0051690,3,0\n"  # fmt: skip
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" \
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,x\n"  # fmt: skip
MOONCAKE = '{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0]}\n' \
           '{"timestamp": 4000, "input_length": 7322, "output_length": 490}\n'  # fmt: skip


@pytest.mark.rule("SIM-11")
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (AZURE, [(0.0, 374, 44), (4.314579, 396, 109)]),
        (BURST, [(0.0, 472, 18), (40.0, 1087, 230)]),
        (MOONCAKE, [(0.0, 6758, 500), (3.0, 7322, 490)]),
        ('{"arrival_s": 1.5, "input_toks": 3, "output_toks": 4}\n', [(0.0, 3, 4)]),
        ('{"start_time_s": 9.5, "input_tokens": 3, "output_tokens": 4}\n', [(0.0, 3, 4)]),
    ],
)
def test_each_form_of_request_trace(
    text: str, wanted: list[tuple[float, int, int]], tmp_path: Path
) -> None:
    (tmp_path / "plain").write_text(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode()))
    for name in ("plain", "packed"):
        got = read_arrivals(tmp_path / name)
        assert [r[1:] for r in got] == [w[1:] for w in wanted]
        assert [r.at_s for r in got] == pytest.approx([w[0] for w in wanted], abs=1e-5)
    got = read_arrivals(tmp_path / "plain", divide=100, stretch=0.5, most=2)
    assert [r[1:] for r in got] == [(-(-w[1] // 100), -(-w[2] // 100)) for w in wanted]
    assert got[-1].at_s == pytest.approx(wanted[-1][0] / 2, abs=1e-5)
    assert len(read_arrivals(tmp_path / "plain", first=len(wanted) - 1)) == 1


@pytest.mark.rule("SIM-11")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (AZURE.replace("374", "many"), ":3: "),
        (MOONCAKE.replace("4000", '"noon"'), ":2: "),
        (MOONCAKE.replace("1000", "NaN"), ":1: "),
        (MOONCAKE.replace("1000", "true"), ":1: "),
        (MOONCAKE.replace("7322", "true"), ":2: "),
        (MOONCAKE.replace("490", "false"), ":2: "),
        ("a,b\n1,2\n", ":2: fields a, b: no request trace that is known; known: TIMESTAMP"),
        (MOONCAKE + "[1]\n", ":3: "),
        (MOONCAKE + "{\n", ":3: {: a JSON object expected"),
        ("", "no requests"),
        (AZURE.split("\n")[0], "no requests"),
    ],
)
def test_a_bad_request_trace_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(BadInput) as refused:
        read_arrivals(tmp_path / "t")
    assert told in str(refused.value)
    with pytest.raises(BadInput, match="divide 0"):
        read_arrivals(tmp_path / "t", divide=0)
    (tmp_path / "z").write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(BadInput, match="no request trace"):
        read_arrivals(tmp_path / "z")


@pytest.mark.rule("SIM-11")
def test_arrivals_in_virtual_time() -> None:
    """Two come late: nobody is there for most of the run; all end, each with its own length."""
    model = models.load("olmoe-1b-7b")
    arrivals = [Arrival(0.0, 4, 6), Arrival(50.0, 2, 3), Arrival(50.0, 40, 5)]
    got = simulate(platforms.load("jetson-thor"), model, routes_for(model), control(model, 0.5, 8),
                   tokens=1000, warm_up=0, arrivals=arrivals)  # fmt: skip
    assert got.finished == 3
    assert got.tokens == 14
    assert got.seconds > 50
    assert got.stalls["compute waits for requests"] > 0.9


@pytest.mark.rule("SIM-11")
def test_real_traces_are_read() -> None:
    known = {"azure2023/AzureLLMInferenceTrace_conv.csv": 19366,
             "azure2023/AzureLLMInferenceTrace_code.csv": 8819,
             "mooncake-fast25/conversation_trace.jsonl.gz": 12031}  # fmt: skip
    for name, count in known.items():
        if not (TRACES / "requests" / name).exists():
            pytest.skip(f"{name} is not here")
        got = read_arrivals(TRACES / "requests" / name, most=1_000_000)
        assert len(got) == count
        assert got[-1].at_s < 3600
        assert all(b.at_s >= a.at_s for a, b in pairwise(got))


def test_zip_entries_are_not_believed(tmp_path: Path) -> None:
    """An array that says it is larger than the file."""
    path = written(tmp_path / "t.npz")
    with zipfile.ZipFile(path) as held:
        parts = {n: held.read(n) for n in held.namelist()}
    parts["topk/1.npy"] = parts["topk/1.npy"][:-1]
    with zipfile.ZipFile(path, "w") as out:
        for name, data in parts.items():
            out.writestr(name, data)
    with pytest.raises(BadInput, match="topk/1: 23 bytes of 24"):
        read_trace(path)
