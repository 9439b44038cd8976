"""Penalties, min-p, log-probabilities, and whose word counts."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_impl.app.main import main
from jax_impl.engine import JaxEngine
from property_tests.engines import SMALL, checkpoint
from property_tests.refusals import refused
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.files.generation import defaults_of, sampling_defaults
from reference.files.requests import Request
from reference.numerics.naive import naive_logits
from reference.sampling import choose, exp, kept, likeliest, log, logprobs, penalised
from reference.vocab.errors import BadInput
from reference.vocab.sampling import Sampling

INF = math.inf
LOGITS = st.lists(st.sampled_from([-INF, -2.0, -0.5, 0.0, 0.25, 1.0, 3.0]) | st.floats(-30, 30),
                  min_size=2, max_size=9).filter(lambda x: max(x) > -INF)  # fmt: skip


# Penalties


def obvious(row: list[float], how: Sampling, prompt: list[int], answer: list[int]) -> list[float]:
    """The penalties, one token after another, in Python floats."""
    out = list(row)
    times = Counter(answer)
    for token in range(len(row)):
        if token in prompt or token in answer:
            if out[token] > 0:
                out[token] /= how.repetition_penalty
            else:
                out[token] *= how.repetition_penalty
        if times[token]:
            out[token] -= how.frequency_penalty * times[token]
            out[token] -= how.presence_penalty
    return out


@pytest.mark.rule("SAMPLE-7")
@given(LOGITS, st.data(), st.sampled_from([0.1, 0.7, 1.0, 1.3, 8.0]),
       st.sampled_from([-2.0, 0.0, 0.4, 1.5]), st.sampled_from([-1.0, 0.0, 0.3, 2.0]))
def test_penalties_equal_the_obvious_version(
    row: list[float], data: Any, repetition: float, presence: float, frequency: float
) -> None:
    ids = st.lists(st.integers(0, len(row) - 1), max_size=12)
    prompt, answer = data.draw(ids), data.draw(ids)
    how = Sampling(repetition_penalty=repetition, presence_penalty=presence,
                   frequency_penalty=frequency)
    before = np.array(row)
    after = penalised(before, how, [*prompt, *answer], len(prompt))
    expected = obvious(row, how, prompt, answer)
    assert after.tobytes() == np.array(expected).tobytes()
    assert before.tolist() == row
    # Greedy takes the greatest of these (SAMPLE-2), the lower index among equals.
    token = choose(np.array(row), how, [*prompt, *answer], len(prompt)).token
    assert token == expected.index(max(expected))


@pytest.mark.rule("SAMPLE-7", "SAMPLE-3")
def test_penalties_come_before_temperature_and_filters() -> None:
    row = np.array([3.0, 2.9, 0.0])
    seen = [0, 1, 1]
    for more in ({}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.99}, {"temperature": 1e-3}):
        how = Sampling(**{"temperature": 1.0, "frequency_penalty": 5.0, "top_k": 1, **more})
        assert choose(row, how, seen, 0).token == 2
        assert choose(row, how, seen, 3).token == 0  # all of it was the prompt
    how = Sampling(repetition_penalty=100.0)
    assert choose(row, how, seen, 3).token == 0  # 0.03, 0.029 and 0.0
    assert choose(row - 1.0, how, seen, 3).token == 0
    assert choose(row - 3.5, how, seen, 3).token == 2  # -0.5 and -0.6 become -50 and -60


# Min-p


@pytest.mark.rule("SAMPLE-8")
def test_min_p_edges() -> None:
    logits = np.log(np.array([8.0, 4.0, 2.0, 2.0]))

    def left(min_p: float, top_k: int = 0, top_p: float = 1.0, t: float = 1.0) -> list[int]:
        return kept(logits, t, top_k, top_p, min_p)[0].tolist()

    assert left(0.0) == [0, 1, 2, 3]
    assert left(0.2) == [0, 1, 2, 3]
    assert left(0.26) == [0, 1]
    assert left(0.51) == [0]
    assert left(1.0) == [0]
    assert left(0.26, t=100.0) == [0, 1, 2, 3]  # after temperature
    assert left(0.0, top_p=0.74) == left(0.2, top_p=0.74) == [0, 1]
    # Top-p counts the mass of what top-k left, and not of what min-p leaves.
    assert left(0.26, top_p=0.76) == [0, 1]
    assert kept(np.array([1.0, 1.0]), 1.0, 0, 1.0, 1.0)[0].tolist() == [0, 1]


@pytest.mark.rule("SAMPLE-8", "SAMPLE-3")
@given(LOGITS, st.sampled_from([0.01, 0.3, 0.9]), st.integers(0, 9),
       st.sampled_from([0.3, 0.8, 1.0]))
def test_min_p_leaves_what_is_likely(
    row: list[float], min_p: float, top_k: int, top_p: float
) -> None:
    logits = np.array(row)
    before, weights = kept(logits, 0.7, top_k, top_p)
    after, left = kept(logits, 0.7, top_k, top_p, min_p)
    good = [w >= min_p * max(weights) for w in weights]
    assert after.tolist() == [t for t, g in zip(before, good, strict=True) if g]
    assert left.tolist() == [w for w, g in zip(weights, good, strict=True) if g]
    assert len(after) >= 1


# Log-probabilities


@pytest.mark.rule("SAMPLE-6")
@given(st.floats(1.0, 1e6) | st.floats(5e-324, 1e308, exclude_min=False))
def test_log_equals_the_librarys(x: float) -> None:
    assert log(x) == pytest.approx(math.log(x), rel=4e-16, abs=4e-16)


@pytest.mark.rule("SAMPLE-10")
@given(LOGITS, st.data())
def test_logprobs_are_those_of_the_unchanged_distribution(row: list[float], data: Any) -> None:
    n = data.draw(st.integers(0, len(row) + 2))
    how = Sampling(temperature=data.draw(st.sampled_from([0.0, 2.0])), top_k=2, min_p=0.1,
                   logprobs=n, repetition_penalty=1.7, presence_penalty=1.0, seed=3)
    logits = np.array(row, np.float32)
    wide = logits.astype(np.float64)
    tokens = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=6))
    choice = choose(logits, how, tokens, 0)
    assert choice.logprobs is not None
    expected = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    assert choice.logprobs.chosen == pytest.approx(expected[choice.token], rel=1e-13, abs=1e-13)
    ranked = sorted(range(len(row)), key=lambda i: (-wide[i], i))[:n]
    assert [token for token, _ in choice.logprobs.top] == ranked
    for token, value in choice.logprobs.top:
        assert value == pytest.approx(expected[token], rel=1e-13, abs=1e-13)
        if token == choice.token:
            assert value == choice.logprobs.chosen
    plain = logprobs(wide, choice.token, n)
    assert plain == choice.logprobs


@pytest.mark.rule("SAMPLE-10")
def test_the_likeliest_are_ranked_and_ties_go_to_the_lower() -> None:
    assert likeliest(np.array([1.0, 5.0, 5.0, 2.0]), 3).tolist() == [1, 2, 3]
    assert likeliest(np.array([1.0, 5.0, 5.0, 2.0]), 1).tolist() == [1]
    assert likeliest(np.array([1.0, 5.0]), 0).tolist() == []
    assert likeliest(np.array([1.0, 5.0]), 9).tolist() == [1, 0]
    told = choose(np.zeros(4), Sampling(logprobs=0), [], 0).logprobs
    assert told is not None
    assert told.top == ()
    assert told.chosen == pytest.approx(-math.log(4), abs=1e-15)
    assert choose(np.zeros(4), Sampling(), [], 0).logprobs is None
    assert float(exp(np.zeros(1))[0]) == 1.0  # min-p counts on it


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0},
     {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan}, {"repetition_penalty": 0.0},
     {"repetition_penalty": -1.0}, {"repetition_penalty": INF}, {"presence_penalty": math.nan},
     {"frequency_penalty": INF}, {"logprobs": -1}],
)  # fmt: skip
def test_values_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(BadInput, match=rf"^sampling: {name} .*right would be"):
        Sampling(**bad)
    refused(Request("a", (1,), **bad).sampling, "request 'a': ", name)


# Whose word counts


@pytest.mark.rule("FILE-14")
def test_the_request_beats_the_flag_beats_the_model() -> None:
    flags, model = {"temperature": 0.5, "top_k": 3}, {"temperature": 0.6, "top_k": 4, "top_p": 0.9}
    asked = Request("a", (1,), temperature=0.0).with_defaults(flags, model)
    assert asked.sampling() == Sampling(temperature=0.0, top_k=3, top_p=0.9)
    assert Request("a", (1,)).with_defaults(flags, {}).sampling() == Sampling(0.5, 3)
    assert Request("a", (1,)).sampling() == Sampling()


@pytest.mark.rule("FILE-15")
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
         {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {"temperature": 1.0}),
        ({"do_sample": None, "eos_token_id": [1, 2], "bos_token_id": 3, "transformers_version": ""},
         {}),
    ],
)
def test_what_the_model_says(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    assert defaults_of(raw, "generation_config.json") == expected


@pytest.mark.rule("FILE-15")
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "an object is needed"),
        ({"do_sample": 1}, "do_sample is 1"),
        ({"do_sample": True, "temperature": -1}, "temperature is -1"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is hot"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1"),
        ({"do_sample": True, "top_k": 1.5}, "top_k is 1.5"),
        ({"do_sample": True, "top_p": 0}, "top_p is 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_what_a_model_may_not_say(raw: Any, words: str, tmp_path: Path) -> None:
    refused(lambda: defaults_of(raw, "g.json"), "g.json: ", words)
    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    refused(lambda: sampling_defaults(tmp_path), "generation_config.json: ", words)


@pytest.mark.rule("FILE-14", "FILE-15", "APP-8", "SAMPLE-10")
def test_flags_and_fields_reach_the_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option changes a run, and where it stands does not matter."""
    model = Path(shutil.copytree(checkpoint(), tmp_path / "model"))
    path, out = tmp_path / "f.jsonl", tmp_path / "out.json"

    def row(asked: dict[str, Any], *flags: object) -> dict[str, Any]:
        path.write_text(json.dumps({"prompt": [5, 6, 7, 5], "max_new_tokens": 16} | asked) + "\n")
        words = ["run", model, "--requests", path, "--engine", "reference", "--ignore-eos",
                 "--quiet", "--json", out, *flags]
        assert main([str(word) for word in words]) == 0
        (found,) = json.loads(out.read_text())["requests"]
        return found

    hot = {"temperature": 1.5}
    plain = row(hot)
    assert "logprobs" not in plain
    for name, value in {
        "temperature": 0.9, "top_k": 3, "top_p": 0.5, "min_p": 0.4, "repetition_penalty": 3.0,
        "presence_penalty": 2.0, "frequency_penalty": 2.0, "seed": 5,
    }.items():
        asked = row(hot | {name: value})["tokens"]
        assert asked != plain["tokens"], name
        flag = "--" + name.replace("_", "-")
        base = {k: v for k, v in hot.items() if k != name}
        assert row(base, flag, value)["tokens"] == asked, name
        assert row(base | {name: value}, flag, 1)["tokens"] == asked, name
        if name not in ("presence_penalty", "frequency_penalty", "seed"):
            told = {"do_sample": True, "temperature": 1.5} | {name: value}
            (model / "generation_config.json").write_text(json.dumps(told))
            assert row({})["tokens"] == asked, name
            assert row({}, "--temperature", 0)["tokens"] != asked or name == "repetition_penalty"
            (model / "generation_config.json").unlink()
    greedy = row({"logprobs": 2})
    assert greedy["tokens"] == row({}, "--logprobs", 0)["tokens"]
    for token, told in zip(greedy["tokens"], greedy["logprobs"], strict=True):
        assert told["top"][0] == [token, told["logprob"]]
        assert told["top"][1][1] <= told["logprob"] < 0
    for words, said in (
        (["--min-p", "2"], "argument --min-p: 2; a number from 0 to 1 expected"),
        (["--top-k", "-1"], "argument --top-k: invalid value '-1'; an integer from 0 to"),
        (["--repetition-penalty", "0"], "0; a number above 0, up to 100 expected"),
        (["--seed", "1" * 5000], "argument --seed: invalid"),
    ):
        assert main(["run", str(model), "--requests", str(path), *words]) == 2
        assert said in capsys.readouterr().err


# Company


def crowd() -> list[Request]:
    """Requests that look back at their own text, in every way."""
    return [
        Request(
            f"r{n}", tuple((7 * n + 3 * i) % 90 + 3 for i in range(1 + 5 * n)), 12,
            temperature=(0.0, 1.2, 0.8)[n % 3], top_p=(1.0, 0.9)[n % 2], seed=n,
            min_p=(0.0, 0.05)[n % 2], repetition_penalty=(1.3, 1.0, 0.8)[n % 3],
            presence_penalty=(0.0, 0.7)[n % 2], frequency_penalty=(0.5, 0.0, -0.4)[n % 3],
            logprobs=(5, 0, None, 2)[n % 4],
        )
        for n in range(6)
    ]  # fmt: skip


@pytest.mark.rule("SAMPLE-9", "NUM-12", "ENGINE-6")
@pytest.mark.parametrize("kind", ["reference", "jax"])
def test_looking_back_gives_the_same_bits_in_any_company(kind: str) -> None:
    open_: Any = {"reference": ReferenceEngine, "jax": JaxEngine}[kind].open
    shared = dict(SMALL)
    if kind == "reference":
        del shared["compile_cache"]
    path, requests = checkpoint(), crowd()
    plain = [Request(r.id, r.prompt, 12, temperature=r.temperature, seed=r.seed) for r in requests]
    with open_(path, memory="100%", **shared) as engine:
        alone = [engine.submit(r, logits=True).result(60) for r in requests]
        unlike = [h.result(60).tokens for h in engine.submit_all(plain)]
    assert sum(a.tokens != b for a, b in zip(alone, unlike, strict=True)) >= 4
    for options, order in (
        ({"memory": "25%", "scheduler": "interleaved"}, requests),
        ({"memory": "50%", "scheduler": "lockstep", "readiness": "expert"}, requests[::-1]),
    ):
        with open_(path, **(shared | options)) as engine:
            handles = {h.id: h for h in engine.submit_all([*order, Request("n", (9, 8), 30)])}
            for expected in alone:
                got = handles[expected.id].result(60)
                assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)
                assert got.error is None
    # What the engine did is what the rules say of its own logits, one token after another.
    for request, got in zip(requests, alone, strict=True):
        assert got.logits is not None
        tokens = list(request.prompt)
        told = []
        for token in got.tokens:
            choice = choose(got.logits[len(tokens) - 1], request.sampling(), tokens,
                            len(request.prompt))
            assert choice.token == token
            told.append(choice.logprobs)
            tokens.append(token)
        assert got.logprobs == (None if request.logprobs is None else tuple(told))


@pytest.mark.rule("SAMPLE-10")
def test_engines_tell_the_same_probabilities() -> None:
    """Both engines against the whole forward pass, teacher-forced, in float64."""
    asked = Request("a", (5, 6, 7), 8, logprobs=3, repetition_penalty=1.5)
    shared = {k: v for k, v in SMALL.items() if k != "compile_cache"}
    found = []
    cached = {"compile_cache": SMALL["compile_cache"]}
    for kind, more in ((ReferenceEngine, {}), (JaxEngine, cached)):
        with kind.open(checkpoint(), memory="100%", **(shared | more)) as engine:
            found.append(engine.submit(asked).result(60))
    assert found[0].tokens == found[1].tokens
    with Checkpoint.open(checkpoint()) as opened:
        rows = naive_logits(opened, [*asked.prompt, *found[0].tokens], np.float64)
    for result in found:
        assert result.logprobs is not None
        assert len(result.logprobs) == 8
        for n, told in enumerate(result.logprobs):
            row = rows[2 + n]
            whole = row.max() + math.log(np.exp(row - row.max()).sum())
            assert told.chosen == pytest.approx(row[result.tokens[n]] - whole, abs=1e-4)
            for token, value in told.top:
                assert value == pytest.approx(row[token] - whole, abs=1e-4)


@pytest.mark.rule("ENGINE-8")
@pytest.mark.parametrize("kind", [ReferenceEngine, JaxEngine])
def test_an_engine_refuses_options_out_of_range(kind: Any) -> None:
    shared = {k: v for k, v in SMALL.items() if k != "compile_cache" or kind is JaxEngine}
    with kind.open(checkpoint(), memory="50%", **shared) as engine:
        refused(lambda: engine.submit(Request("a", (1,), 2, min_p=3.0)), "request 'a': ", "min_p")
        assert engine.submit(Request("b", (1,), 2)).result(60).error is None

