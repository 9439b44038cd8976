"""SAMPLE-1..6: exact cases, an obvious second version, and one statistical check."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.sampling import best, exp, kept, philox4x64, ranking, sample, uniform
from reference.vocab.errors import BadInput, RequestFailed

NAN, INF = math.nan, math.inf


def draw(logits: list[float], position: int = 0, **options: float) -> int:
    """`sample` with defaults: temperature 1, no filters, seed 0."""
    o: dict = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0} | options
    return sample(np.array(logits, np.float32), position=position, **o)


def allowed(logits: list[float], top_k: int, top_p: float, temperature: float = 1.0) -> list[int]:
    """The tokens that survive the filters."""
    return kept(np.array(logits, np.float64), temperature, top_k, top_p)[0].tolist()


# The check


@pytest.mark.rule("SAMPLE-1")
@pytest.mark.parametrize("bad", [[0, NAN], [NAN, INF], [0, INF], [-INF, -INF], [-INF, NAN]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_from_such_logits(bad: list[float], temperature: float) -> None:
    with pytest.raises(RequestFailed, match="position 3"):
        draw(bad, position=3, temperature=temperature)


@pytest.mark.rule("SAMPLE-1")
def test_minus_infinity_is_a_token_that_never_comes() -> None:
    assert draw([-INF, 0.0, -INF], temperature=0.0) == 1
    assert {draw([-INF, 0.0, -INF], position=p) for p in range(100)} == {1}


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": NAN}, {"temperature": INF}, {"top_k": -1},
     {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": NAN}],
)  # fmt: skip
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="right would be"):
        draw([0.0, 1.0], **options)


# Greedy


@pytest.mark.rule("SAMPLE-2")
def test_greedy_takes_the_lower_of_equals_and_reads_nothing_else() -> None:
    assert draw([1.0, 3.0, 3.0], temperature=0.0) == 1
    assert draw([-0.0, 0.0], temperature=0.0) == 0
    assert draw([0.0, -0.0], temperature=0.0) == 0
    for seed in range(20):
        assert draw([1.0, 3.0, 3.0], temperature=0.0, seed=seed, top_k=1, top_p=0.1) == 1


# The filters


@pytest.mark.rule("SAMPLE-3")
def test_top_p_sees_what_top_k_left() -> None:
    # Probabilities 1/2, 1/4, 1/8, 1/8. Of the first two 1/2 is two thirds: enough for 0.6 alone,
    # while of all four 0.6 takes two.
    logits = [math.log(8), math.log(4), math.log(2), math.log(2)]
    assert allowed(logits, 0, 0.6) == [0, 1]
    assert allowed(logits, 2, 0.6) == [0]


@pytest.mark.rule("SAMPLE-3")
def test_temperature_comes_before_the_filters() -> None:
    logits = [2.0, 1.0, 0.0]
    assert allowed(logits, 0, 0.5, temperature=1.0) == [0]
    assert allowed(logits, 0, 0.5, temperature=10.0) == [0, 1]
    assert allowed([0.0, 1e30], 0, 1.0, temperature=1e-300) == [0, 1]  # no overflow
    assert {draw([0.0, 1e30], p, temperature=1e-300) for p in range(20)} == {1}


@pytest.mark.rule("SAMPLE-4")
def test_top_k_edges() -> None:
    assert allowed([1.0, 2.0, 2.0, 2.0], 2, 1.0) == [1, 2]
    assert allowed([2.0, 1.0, 2.0, 2.0], 3, 1.0) == [0, 2, 3]
    assert allowed([0.0, -0.0, 0.0], 1, 1.0) == [0]
    assert allowed([1.0, 2.0], 0, 1.0) == [0, 1]
    assert allowed([1.0, 2.0], 2, 1.0) == [0, 1]
    assert allowed([1.0, 2.0], 9, 1.0) == [0, 1]


@pytest.mark.rule("SAMPLE-4")
def test_top_p_edges() -> None:
    four = [0.0] * 4  # each exactly a quarter
    assert allowed(four, 0, 0.25) == [0]
    assert allowed(four, 0, math.nextafter(0.25, 1)) == [0, 1]
    assert allowed(four, 0, 0.5) == [0, 1]
    assert allowed(four, 0, 0.75) == [0, 1, 2]
    assert allowed(four, 0, 5e-324) == [0]
    assert allowed(four, 0, math.nextafter(1.0, 0)) == [0, 1, 2, 3]
    assert allowed([0.0, 1.0, 5.0], 0, 1e-9) == [2]


@st.composite
def rows(draw_: st.DrawFn) -> list[float]:
    """Short rows with many ties."""
    return draw_(st.lists(st.sampled_from([-2.0, -0.5, -0.0, 0.0, 0.25, 1.0, 3.0]), min_size=1,
                          max_size=12))  # fmt: skip


def obvious(logits: list[float], top_k: int, top_p: float) -> list[int]:
    """The filters over a sorted list of Python floats."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    weight = {i: float(exp(np.array([logits[i] - max(logits)]))[0]) for i in order}
    whole = 0.0
    for i in order:
        whole += weight[i]
    if top_p == 1.0:
        return sorted(order)
    out: list[int] = []
    reached = 0.0
    while not out or reached < top_p * whole:
        reached += weight[order[0]]
        out.append(order.pop(0))
    return sorted(out)


@pytest.mark.rule("SAMPLE-3", "SAMPLE-4")
@given(rows(), st.integers(0, 13), st.sampled_from([0.01, 0.3, 0.55, 0.8, 0.97, 1.0]))
def test_filters_equal_the_obvious_version(logits: list[float], top_k: int, top_p: float) -> None:
    assert allowed(logits, top_k, top_p) == obvious(logits, top_k, top_p)


@given(rows(), st.data())
def test_best_equals_a_full_sort(logits: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(logits)))
    scores = np.array(logits)
    assert best(scores, k).tolist() == np.sort(ranking(scores)[:k]).tolist()


# The draw


@pytest.mark.rule("SAMPLE-5")
@pytest.mark.parametrize(("seed", "position"), [(0, 1), (5, 7), (2**63 + 1, 2**40), (77, 2**32)])
def test_philox_equals_numpys(seed: int, position: int) -> None:
    # NumPy counts up before it draws.
    theirs = np.random.Philox(
        key=np.array([seed, 0], np.uint64), counter=np.array([position - 1, 0, 0, 0], np.uint64)
    ).random_raw(4)
    assert list(philox4x64((position, 0, 0, 0), (seed, 0))) == theirs.tolist()
    assert uniform(seed, position) == (int(theirs[0]) >> 11) / 2**53


@pytest.mark.rule("SAMPLE-5")
def test_the_token_is_where_the_running_sum_exceeds_u() -> None:
    weights = [3, 1, 0, 4]  # of 8: [0, 3/8), [3/8, 1/2), nothing, [1/2, 1)
    logits = [math.log(w) if w else -INF for w in weights]
    seen = set()
    for position in range(400):
        u = uniform(9, position)
        expected = 0 if u < 3 / 8 else 1 if u < 1 / 2 else 3
        assert draw(logits, position, seed=9) == expected
        seen.add(expected)
    assert seen == {0, 1, 3}


@pytest.mark.rule("SAMPLE-5")
def test_a_draw_rounded_up_to_the_whole_is_the_last_token_with_weight(monkeypatch) -> None:
    monkeypatch.setattr("reference.sampling.uniform", lambda seed, position: 1.0)
    assert draw([0.0, 0.0, -INF]) == 1


@pytest.mark.rule("SAMPLE-5")
def test_frequencies_fit_the_distribution() -> None:
    """Chi-square over 20,000 draws, after temperature 0.7, top-k 5 and top-p 0.95."""
    logits = np.array([0.3, 1.9, -0.4, 1.1, 0.8, 1.5, -3.0], np.float32)
    p = np.exp(logits.astype(np.float64) / 0.7)
    p[np.argsort(-p)[5:]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    inside = order[: 1 + int((np.cumsum(p[order]) < 0.95).sum())]
    p = np.where(np.isin(np.arange(7), inside), p, 0)
    p /= p.sum()
    n = 20_000
    counts = np.bincount(
        [draw(list(logits), i, temperature=0.7, top_k=5, top_p=0.95, seed=3) for i in range(n)],
        minlength=7,
    )
    assert counts[p == 0].sum() == 0
    some = p > 0
    chi2 = ((counts[some] - n * p[some]) ** 2 / (n * p[some])).sum()
    assert some.sum() == 4
    assert chi2 < 16.27  # 3 degrees of freedom: 1 in 1,000


@pytest.mark.rule("SAMPLE-5")
def test_seeds_and_positions_are_independent() -> None:
    u = np.array([[uniform(s, p) for p in range(64)] for s in range(64)])
    assert len(np.unique(u)) == u.size
    # Rows of neighbouring seeds and columns of neighbouring positions do not go together.
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / math.sqrt(a.size)
    assert uniform(2**64 + 5, 1) == uniform(5, 1)


# The same everywhere


@pytest.mark.rule("SAMPLE-6")
def test_exp_is_close_and_its_bits_are_fixed() -> None:
    x = np.linspace(-708, 0, 20_001)
    assert np.abs(exp(x) / np.exp(x) - 1).max() < 2 * 2.0**-52
    assert exp(np.array([0.0, -0.0, -INF, -709.0])).tolist() == [1.0, 1.0, 0.0, 0.0]
    # Written down once; a platform or version that gives other bits must not pass in silence.
    fixed = {
        -0.1: "0x1.cf46d99d52b3ap-1",
        -1.0: "0x1.78b56362cef38p-2",
        -20.5: "0x1.57a3afeed00acp-30",  # libm's last digit is b
        -700.0: "0x1.14f2b0fb9307fp-1010",
    }
    for value, bits in fixed.items():
        assert float(exp(np.array([value]))[0]) == float.fromhex(bits), value


@pytest.mark.rule("SAMPLE-6")
def test_a_fixed_stream() -> None:
    logits = np.array([(7 * i % 11) / 4 for i in range(32)], np.float32)
    got = [
        sample(logits, temperature=0.9, top_k=20, top_p=0.9, seed=12, position=p) for p in range(16)
    ]
    assert got == [31, 17, 17, 25, 3, 14, 3, 17, 31, 28, 7, 25, 15, 15, 17, 31]
