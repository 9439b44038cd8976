"""Predictors: each against a tiny computation that can be checked by hand, and at work."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from reference.prediction import PREFETCHERS, predictor, simulated
from reference.prediction.accuracy import Accuracy
from reference.prediction.activation import ActivationMatrices
from reference.prediction.base import Predictor
from reference.prediction.layer_table import PRIOR, STAY, LayerTable
from reference.prediction.listener import Listener
from reference.prediction.next_gate import NextGate, votes
from reference.prediction.noisy_oracle import ACCURACY, MIXTRAL, NoisyOracle, accuracies
from reference.prediction.token_table import TokenTable
from reference.vocab.actions import Admit, Compute, Load
from reference.vocab.errors import BadInput, Unsupported
from reference.vocab.events import Loaded, LoadFailed, Predicted, Routed, Sampled
from reference.vocab.ids import ENTRY, ExpertKey, Visit
from reference.vocab.options import ControlOptions

OPTIONS = ControlOptions(layers=(0, 2, 3), experts=4, top_k=2, slots=6, chunk=4, prefetch=2)


def pairs(said: list[Predicted]) -> dict[tuple[int, int], dict[int, float]]:
    """(chunk, layer) -> expert -> score."""
    return {p.visit[1:]: {e: round(s, 6) for e, s in p.scores} for p in said}


# -- one by one ----------------------------------------------------------------------------------


@pytest.mark.rule("PREDICT-3")
def test_predictors_by_name() -> None:
    assert predictor("none", OPTIONS) is None
    kinds = {type(predictor(name, OPTIONS)) for name in PREFETCHERS if name != "none"}
    assert kinds == {NextGate, ActivationMatrices, LayerTable, TokenTable}
    with pytest.raises(Unsupported, match="next-gate, activation, layer, token"):
        predictor("psychic", OPTIONS)
    assert predictor("layer", OPTIONS.with_(layers=(), slots=0)) is None
    for name in ("", "none"):
        assert simulated(name, OPTIONS, lambda v: ()) is None
    with pytest.raises(BadInput, match=r"predict: '1\.5'; activation, layer, next-gate-mixtral"):
        simulated("1.5", OPTIONS, lambda v: ())


@pytest.mark.rule("PREDICT-3")
def test_what_is_told_is_the_greatest_above_zero_of_equals_the_lowest() -> None:
    base = Predictor(OPTIONS.with_(prefetch=3))
    visit = Visit(0, 0, 2)
    [said] = base.say(visit, np.array([0.0, 0.5, 0.25, 0.5]))
    assert said == Predicted(visit, ((1, 0.5), (3, 0.5), (2, 0.25)))
    assert base.say(visit, np.zeros(4)) == []
    assert Predictor(OPTIONS.with_(prefetch=0)).most == 2


@pytest.mark.rule("PREDICT-4")
def test_next_gate_passes_on_what_the_router_said_by_rank() -> None:
    # Two rows, three choices each, worth 1, 0.75, 0.5: expert 1 has 1 + 0.5, expert 0 0.75 + 0.75.
    ranked = np.array([[1, 0, 2], [3, 0, 1]])
    assert votes(ranked, 3) == [(0, 1.5), (1, 1.5), (3, 1.0)]
    assert votes(np.array([[2]]), 4) == [(2, 1.0)]
    gate = NextGate(OPTIONS)
    said = gate.routed(Visit(7, 1, 0), ((0, 1),), gates={2: votes(ranked, 3)})
    assert said == [Predicted(Visit(7, 1, 2), ((0, 1.5), (1, 1.5)))]
    assert gate.routed(Visit(7, 1, 3), ((0, 1),), gates={}) == []


@pytest.mark.rule("PREDICT-5")
def test_activation_matrices_follow_the_nearest_ended_request() -> None:
    a = ActivationMatrices(OPTIONS.with_(prefetch=4), stored=2, ahead=2)
    # Two requests end: the first uses (0, 1) everywhere, the second (2, 3), and (0, 3) at the end.
    for number, last in ((0, (0, 1)), (1, (0, 3))):
        first = (0, 1) if number == 0 else (2, 3)
        for layer, named in ((0, first), (2, first), (3, last)):
            assert a.routed(Visit(number, 0, layer), (named,)) == [] or number == 1
        a.ended(number)
    # The third begins like the second: cosine 1 with it, 0 with the first.
    said = pairs(a.routed(Visit(2, 0, 0), ((2, 3),)))
    near, far = 1 - 1 / 4, 1 - 2 / 4
    assert said == {(0, 2): {2: near, 3: near}, (0, 3): {0: far, 3: far}}
    assert a.nearest == [a.nearest[0], 1]
    # The next token: all rows count; (2, 3), then half and half: the second is still nearer.
    a.routed(Visit(2, 0, 2), ((0, 2),))
    a.routed(Visit(2, 0, 3), ((0, 3),))
    assert set(pairs(a.opened(Visit(2, 1, ENTRY), ()))) == {(1, 0), (1, 2)}
    # A full store drops what was nearest least often.
    a.nearest[:] = [0, 5]
    a.ended(2)
    assert a.filled == 2 and a.counts[0, 0].tolist() == [0, 0, 1, 1]
    assert a.nearest == [0, 5] and not a.running and not a.cosines


@pytest.mark.rule("PREDICT-5")
def test_cosines_kept_up_to_date_are_those_computed_anew() -> None:
    rng = np.random.default_rng(1)
    a = ActivationMatrices(OPTIONS, stored=3)
    for number in range(8):
        for chunk in range(3):
            for layer in OPTIONS.layers:
                named = tuple(int(e) for e in rng.permutation(4)[:2])
                a.routed(Visit(number, chunk, layer), (named,))
                a.routed(Visit(100, chunk, layer), (named,))
        a.ended(number)
        mine = a.running[100]
        for j in range(a.filled):
            cos = [
                float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
                for x, y in zip(mine, a.counts[j], strict=True)
            ]
            assert np.allclose(cos, a.cosines[100][:, j], atol=1e-6)


@pytest.mark.rule("PREDICT-6")
def test_layer_table_is_the_naive_bayes_of_its_counts() -> None:
    t = LayerTable(OPTIONS.with_(prefetch=4))
    t.routed(Visit(0, 0, 0), ((0, 1), (2, 3)))
    t.routed(Visit(0, 0, 2), ((0, 2), (1, 3)))
    assert t.pairs[0].tolist() == [[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 1, 0, 1]]
    said = pairs(t.routed(Visit(0, 1, 0), ((0, 3),)))
    assert set(said) == {(1, 2)}
    p = (1 + PRIOR * 0.5) / (2 + PRIOR)  # every expert was used by one of two tokens
    seen = {0: 2, 3: 2}  # tokens that used expert e at layer 0, this one included
    # Row 1 kept nothing of row 0's experts there.
    kept = (STAY * PRIOR + 0) / (PRIOR + 2)
    for f in range(4):
        odds = p
        for e in (0, 3):
            odds *= (t.pairs[0][e][f] + PRIOR * p) / ((seen[e] + PRIOR) * p)
        odds *= (kept if f in (1, 3) else 1 - kept) / 0.5  # the last token there used 1 and 3
        assert math.isclose(said[1, 2][f], odds / (1 + odds), rel_tol=1e-5)
    t.ended(0)
    assert not t.last and not t.chunk and t.opened(Visit(0, 2, ENTRY), ()) == []


@pytest.mark.rule("PREDICT-6")
def test_layer_table_learns_a_rule_that_is_there() -> None:
    rng = np.random.default_rng(0)
    o = ControlOptions(layers=(0, 1), experts=16, top_k=2, slots=8, prefetch=2)
    t, right = LayerTable(o), 0
    for n in range(300):
        named = tuple(int(e) for e in rng.permutation(16)[:2])
        follow = tuple((e * 5 + 3) % 16 for e in named)
        said = t.routed(Visit(0, n, 0), (named,))
        told = {e for p in said for e, _ in p.scores}
        right += len(told & set(follow)) if n >= 200 else 0
        t.routed(Visit(0, n, 1), (follow,))
    assert right > 0.9 * 200  # by chance 25


@pytest.mark.rule("PREDICT-7")
def test_token_table_remembers_what_a_token_used() -> None:
    t = TokenTable(OPTIONS.with_(prefetch=4), known=2, ahead=2)
    assert t.opened(Visit(0, 0, ENTRY), (5, 6)) == []
    for layer, experts in ((0, ((0, 1), (2, 3))), (2, ((1, 2), (1, 0))), (3, ((0, 1), (0, 1)))):
        t.routed(Visit(0, 0, layer), experts, (5, 6))
    assert pairs(t.opened(Visit(1, 4, ENTRY), (6,))) == {
        (4, 0): {2: 1.0, 3: 1.0}, (4, 2): {0: round(2 / 3, 6), 1: round(2 / 3, 6)},
    }  # fmt: skip
    said = pairs(t.routed(Visit(1, 4, 0), ((0, 3),), (6,)))
    assert said[4, 2] == {0: 1.0, 1: 1.0} and said[4, 3] == {0: 0.666667, 1: 0.666667}
    t.routed(Visit(1, 5, 0), ((0, 3),), (7,))  # two tokens are known: 5 is the oldest
    assert list(t.counts) == [6, 7]
    assert t.counts[6][0].tolist() == [1, 0, 1, 2]


@pytest.mark.rule("PREDICT-8")
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 0.9, 1.0])
def test_the_noisy_oracle_has_the_accuracy_that_it_is_given(accuracy: float) -> None:
    rng = np.random.default_rng(3)
    o = ControlOptions(layers=(0, 1, 2), experts=32, top_k=4, slots=8, prefetch=4)
    truth = {}

    def named(visit: Visit) -> tuple[tuple[int, ...], ...]:
        if visit not in truth:
            truth[visit] = (tuple(int(e) for e in rng.permutation(32)[:4]),)
        return truth[visit]

    oracle = NoisyOracle(o, named, (0.0, accuracy, accuracy), seed=2)
    right = total = 0
    for chunk in range(400):
        assert oracle.opened(Visit(0, chunk, ENTRY), ()) == []  # no gate before the first layer
        for layer in (0, 1, 2):
            for said in oracle.routed(Visit(0, chunk, layer), named(Visit(0, chunk, layer))):
                assert said.visit.layer == layer + 1 and len(said.scores) == 4
                right += len({e for e, _ in said.scores} & set(named(said.visit)[0]))
                total += 4
    assert total == (0 if not accuracy else 400 * 2 * 4)
    assert not total or abs(right / total - accuracy) < 4 * math.sqrt(0.25 / total)
    again = NoisyOracle(o, named, (0.0, accuracy, accuracy), seed=2)
    visit = Visit(0, 7, 0)
    assert again.routed(visit, named(visit)) == oracle.routed(visit, named(visit))


@pytest.mark.rule("PREDICT-8")
def test_published_accuracies() -> None:
    assert len(MIXTRAL) == 32 and MIXTRAL[1] == 0.566 and MIXTRAL[31] == 0.850
    assert accuracies("next-gate-mixtral", 32) == MIXTRAL
    assert accuracies("next-gate-qwen3", 3) == (0.0, 0.886, 0.886)
    assert accuracies("perfect", 3) == (1.0, 1.0, 1.0)
    assert accuracies("token-olmoe", 3) == (0.625,) * 3
    assert ACCURACY["next-gate-dsv2-lite"] == 0.79 and ACCURACY["trace"] == 0.6
    for name, layers in (("next-gate-mixtral", 24), ("clairvoyant", 24)):
        with pytest.raises(BadInput, match=name):
            accuracies(name, layers)
    with pytest.raises(BadInput, match="3 numbers from 0 to 1"):
        NoisyOracle(OPTIONS, lambda v: (), (0.5, 2.0, 0.5))


@pytest.mark.rule("PREDICT-8")
def test_a_simulated_table_by_token_id_speaks_as_the_engines_own() -> None:
    """Of two layers at a time, from the token on, the further one at two thirds."""

    def truth(visit: Visit) -> tuple[tuple[int, ...], ...]:
        return ((visit.layer, 1),)

    for name, ahead in (("token-mixtral", (0, 2)), ("perfect", (0,))):
        said = simulated(name, OPTIONS, truth)
        assert said is not None
        for visit, layers in ((Visit(0, 0, ENTRY), ahead), (Visit(0, 0, 2), (3,))):
            told = said.opened(visit, ()) if visit.layer == ENTRY else said.routed(visit, ())
            assert tuple(p.visit.layer for p in told) == layers
            best = [max(score for _, score in p.scores) for p in told]
            assert best == pytest.approx([1, 2 / 3][: len(told)] if name != "perfect" else [1])


@pytest.mark.rule("PREDICT-8")
def test_an_oracle_that_speaks_of_several_layers() -> None:
    """Layers 0, 2 and 3 have experts: of as many as there are, each as right as was said."""

    def truth(visit: Visit) -> tuple[tuple[int, ...], ...]:
        return ((visit.layer, 1),)

    for name, first, score in (
        ("perfect@2", (0, 2), (1, 2 / 3)), ("perfect@9", (0, 2, 3), (1, 0.9, 0.8)),
        ("1.0@2", (2,), (2 / 3,)), ("1@1", (), ()),
    ):  # fmt: skip
        said = simulated(name, OPTIONS, truth)
        assert said is not None
        told = said.opened(Visit(0, 0, ENTRY), ())
        assert tuple(p.visit.layer for p in told) == first
        for p, most in zip(told, score, strict=True):
            high = {expert for expert, value in p.scores if value == pytest.approx(most)}
            assert high == {p.visit.layer, 1}
    for bad in ("0.9@0", "0.9@", "0.9@x", "0.9@-1", "0.9@1.5", "activation@2", "@2", "nan", "2@2"):
        with pytest.raises(BadInput, match=r"a number of layers at a time, 1 or more") as refused:
            simulated(bad, OPTIONS, truth)
        assert f"predict: {bad!r}" in str(refused.value)


def shares(token: np.ndarray, expert: np.ndarray, n: np.ndarray, k: int) -> dict[str, float]:
    """Of the experts that occurrences use, how many are among the k most used: by the token's own
    counts, by those of half of its occurrences for the other half, by the layer's."""
    times = np.bincount(token, n).astype(int) // k
    assert (n <= times[token]).all()
    half = np.random.default_rng(0).hypergeometric(n, times[token] - n, times[token] // 2)
    layer = np.bincount(expert, n)

    def share(known: np.ndarray, asked: np.ndarray) -> float:
        order = np.lexsort((expert, -known, token))
        rank = np.arange(len(order)) - np.searchsorted(token[order], token[order])
        return asked[order][(rank < k) & (known[order] > 0)].sum() / asked.sum()

    return {"own": share(n, n), "half": share(half, n - half),
            "layer": np.sort(layer)[-k:].sum() / n.sum()}  # fmt: skip


@pytest.mark.rule("PREDICT-8")
def test_shares_of_a_table_by_token_id() -> None:
    """Three tokens of one expert each: one is steady, one is not, one comes once."""
    token, expert = np.array([0, 1, 1, 2]), np.array([0, 1, 2, 3])
    got = shares(token, expert, np.array([8, 500, 500, 1]), 1)
    assert got["own"] == pytest.approx(509 / 1009) and got["layer"] == pytest.approx(500 / 1009)
    assert 0.4 < got["half"] < 0.51
    assert shares(token[:1], expert[:1], np.array([8]), 1)["half"] == 1.0


@pytest.mark.rule("PREDICT-8")
@pytest.mark.parametrize(
    ("name", "file", "k", "own", "other", "layer"),
    [("token-olmoe", "olmoe", 8, 0.676, 0.299, 0.385),
     ("token-mixtral", "mistral", 2, 0.630, 0.420, 0.285)],
)  # fmt: skip
def test_accuracy_of_published_tables_by_token_id(
    name: str, file: str, k: int, own: float, other: float, layer: float
) -> None:
    """The figure, and those that are told beside it."""
    traces = Path(__file__).parents[2] / "shared" / "traces" / "routing-stats-olmoe"
    if not (traces / f"{file}.npz").exists():
        pytest.skip("counts of experts by token id are not here")
    held, found, across = np.load(traces / f"{file}.npz"), [], []
    domains = sorted({key.split("/")[0] for key in held if key.endswith("tok_n")})
    experts = held[f"{domains[0]}/counts"].shape[1]
    for i in range(3):
        parts = []
        for domain in domains:
            here = held[f"{domain}/tok_layer"] == i
            token, expert, n = (held[f"{domain}/tok_{x}"][here].astype(int)
                                for x in ("id", "expert", "n"))  # fmt: skip
            parts.append((token * experts + expert, n))
            found.append(shares(np.unique(token, return_inverse=True)[1], expert, n, k))
        size = 1 + max(code.max() for code, _ in parts)
        total = np.bincount(np.concatenate([c for c, _ in parts]),
                            np.concatenate([n for _, n in parts]), minlength=size)  # fmt: skip
        for code, n in parts:
            known = total - np.bincount(code, n, minlength=size)
            known = np.pad(known, (0, -len(known) % experts)).reshape(-1, experts)
            best = np.argsort(-known, 1, kind="stable")[:, :k]
            named = np.zeros(known.shape, bool)
            np.put_along_axis(named, best, True, 1)
            across.append(n[(named & (known > 0)).ravel()[code]].sum() / n.sum())
    means = {key: float(np.mean([f[key] for f in found])) for key in found[0]}
    assert means["half"] == pytest.approx(ACCURACY[name], abs=0.002)
    assert means["own"] == pytest.approx(own, abs=0.001)
    assert means["layer"] == pytest.approx(layer, abs=0.001)
    assert np.mean(across) == pytest.approx(other, abs=0.001)


@pytest.mark.rule("PREDICT-9")
def test_accuracy_of_a_small_story() -> None:
    a = Accuracy(most=2)
    a.action(Load(1, ExpertKey(2, 3), 0, guess=True))  # a warm start's: not counted
    a.action(Admit(0))
    a.event(Loaded(1))
    a.event(Predicted(Visit(0, 0, 2), ((3, 1.0), (1, 0.5), (0, 0.4))))  # two count; 3 is there
    a.action(Load(2, ExpertKey(2, 1), 1, guess=True))
    a.event(Predicted(Visit(0, 0, 3), ((2, 1.0), (0, 0.0))))
    a.event(Routed(Visit(0, 0, 2), ((1, 2),)))
    assert a.overall.as_dict() == {
        "predicted": 2, "named": 2, "right": 1, "precision": 0.5, "recall": 0.5,
    }  # fmt: skip
    assert (a.absent.predicted, a.absent.named, a.absent.right) == (1, 2, 1)
    a.action(Compute(1, 2, (), ((1, 1),)))  # the guess is used
    a.action(Load(3, ExpertKey(3, 2), 1, guess=True))
    a.event(LoadFailed(3, "EIO"))
    a.action(Load(4, ExpertKey(3, 1), 1, guess=True))
    a.action(Load(5, ExpertKey(0, 0), 1))  # and this one is given away unread
    a.event(Routed(Visit(0, 0, 3), ((2, 3),)))
    a.event(Routed(Visit(0, 1, 0), ((2, 3),)))
    told = a.as_dict()
    assert (told["routed"], told["predicted"]) == (3, 2)
    assert (told["guesses"], told["used"], told["failed"]) == (3, 1, 1)
    assert told["overall"]["right"] == 2 and told["absent"]["named"] == 4


@pytest.mark.rule("PREDICT-2", "PREFETCH-1")
def test_the_listener_speaks_behind_what_it_heard_and_not_of_prompts_when_interleaved() -> None:
    tokens = {(0, 0): (4, 5), (0, 1): (6,)}
    truth = lambda visit: ((1, 2),)  # noqa: E731
    for grouping, heard in (("lockstep", 1), ("interleaved", 0)):
        o = OPTIONS.with_(grouping=grouping)
        ear = Listener(NoisyOracle(o, truth, (1.0, 1.0, 1.0)), o, lambda v: tokens[v[:2]])
        prompt = ear.heard(Routed(Visit(0, 0, 0), ((0, 1), (2, 3))), 0)
        assert len(prompt) == heard
        assert ear.heard(Sampled(0, 6, False), 0) == [
            Predicted(Visit(0, 1, 0), ((1, 1.0), (2, 1.0)))
        ]
        assert ear.heard(Sampled(0, 6, True), 0) == []
