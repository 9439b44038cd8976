"""What a caller can get wrong: options, requests, callbacks, a predictor. Each is told, or is that
one request's failure; no engine is harmed, and the log stays one that every checker takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import LIMIT_S, SMALL, alone, checkpoint, opened, request

import jax_impl.engine
import reference.engine
from jax_impl.app.main import main
from jax_impl.engine import JaxEngine
from reference.engine import ReferenceEngine
from reference.files.event_log import read_log
from reference.files.requests import Request
from reference.prediction import Predictor
from reference.simulator.costs import CostModel
from reference.vocab.errors import BadInput, CoveyError, IllegalEvent
from reference.vocab.events import Predicted
from reference.vocab.ids import Visit

KINDS = ("jax", "reference")
OPEN: dict[str, Callable[..., Any]] = {"jax": JaxEngine.open, "reference": ReferenceEngine.open}
SHARED = {k: SMALL[k] for k in ("chunk", "kv_block", "ignore_eos", "keep_log")}
both = pytest.mark.parametrize("kind", KINDS)


@contextmanager
def one_of(kind: str, **options: Any) -> Iterator[Any]:
    """An engine whose log is judged when it is closed (by conftest.py, for the readable one)."""
    whole = (opened(**options) if kind == "jax" else
             ReferenceEngine.open(checkpoint(), memory="50%", **SHARED, **options))  # fmt: skip
    with whole as engine:
        yield engine


# -- options -------------------------------------------------------------------------------------


@pytest.mark.rule("OPTIONS-1")
@both
@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("max_lag", -1, 0), ("max_lag", 0.5, 0), ("retries", -1, 0), ("bulk_slots", -1, 0),
        ("bulk_every", 0, 1), ("prefetch_loads", -1, 0), ("prefetch_experts", -1, 0),
        ("max_rows", 0, 1), ("kv_block", 0, 1), ("kv_tokens", -1, 0), ("chunk", "4", 1),
        ("max_running", True, 1),
    ],
)  # fmt: skip
def test_a_count_that_is_none_is_refused(kind: str, name: str, value: Any, least: int) -> None:
    told = f"^{name}: {value!r}; an integer of at least {least} expected$"
    with pytest.raises(BadInput, match=told):
        OPEN[kind](checkpoint(), **{name: value})


@pytest.mark.rule("OPTIONS-1", "PREFETCH-1")
@both
def test_guesses_without_effect_are_refused(kind: str) -> None:
    others = "interleaved, balanced, micro-queues, lockstep, expected"
    with pytest.raises(BadInput, match=f"^prefetch: layer; lockstep-blocking .*{others}$"):
        OPEN[kind](checkpoint(), prefetch="layer", scheduler="lockstep-blocking")
    with pytest.raises(BadInput, match=r"^prefetch_experts: 3; without prefetch nothing"):
        OPEN[kind](checkpoint(), prefetch_experts=3)


@pytest.mark.rule("OPTIONS-1")
def test_the_command_refuses_experts_to_guess_without_a_guesser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_text('{"prompt": [1]}\n')
    words = ["run", str(checkpoint()), "--requests", str(tmp_path / "f"), "--prefetch-experts", "3"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("covey run: prefetch_experts: 3; without prefetch")


# -- requests ------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5; an integer from 0"),
    ({"max_new_tokens": float("nan")}, "max_new_tokens is nan"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"max_new_tokens": None}, "max_new_tokens is not given"),
    ({"arrival_s": float("nan")}, "arrival_s is nan; a number from 0"),
    ({"arrival_s": float("inf")}, "arrival_s is inf"),
    ({"arrival_s": "soon"}, "arrival_s is soon"),
    ({"seed": 1.5, "temperature": 1.0}, "seed is 1.5; an integer from 0"),
    ({"seed": -1}, "seed is -1"),
    ({"temperature": "hot"}, "temperature is hot"),
    ({"stop": ("\n",)}, "stop text"),
    ({"stop": 5}, "stop is 5"),
    ({"stop": (1.5,)}, r"stop\[0\] is 1.5"),
    ({"prompt": [1, 2]}, "not a tuple of integers"),
    ({"prompt": (True,)}, "not a tuple of integers"),
    ({"prompt": ()}, "the prompt is empty"),
    ({"prompt": "text"}, "the prompt is text"),
    ({"id": None}, "request: id is None"),
    ({"id": "a\nb"}, "request: id is"),
]


@pytest.mark.rule("ENGINE-8")
@both
def test_a_request_that_is_none_is_refused_by_every_engine(kind: str) -> None:
    asked = request(1, 3, 4)
    with one_of(kind) as engine:
        for changed, says in BAD:
            fields: dict[str, Any] = {"id": "x", "prompt": (1, 2), "max_new_tokens": 3} | changed
            with pytest.raises(BadInput, match=says) as told:
                engine.submit(Request(**fields))
            assert "\n" not in str(told.value)
        assert engine.submit(asked).result(LIMIT_S).tokens == alone(asked)[0]


# -- callbacks -----------------------------------------------------------------------------------


class Odd:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


def raising(error: BaseException) -> Callable[..., Any]:
    def callback(*_: Any) -> Any:
        raise error

    return callback


@pytest.mark.rule("ENGINE-7", "ENGINE-13")
@both
def test_a_callback_is_its_own_requests_trouble(kind: str) -> None:
    mine, other = request("mine", 5, 4), request("other", 7, 6)
    with one_of(kind) as engine:
        cases: dict[str, dict[str, Any]] = {
            "stop_at: ValueError: boo hoo": {"stop_at": raising(ValueError("boo\nhoo"))},
            "on_logits: ValueError: boo": {"on_logits": raising(ValueError("boo"))},
            "stop_at: SystemExit: 3": {"stop_at": raising(SystemExit(3))},
            "stop_at: RuntimeError: no truth": {"stop_at": lambda token: Odd()},
            "stop_at: ValueError: The truth value": {"stop_at": lambda token: np.zeros(2)},
            "stop_at: TypeError": {"stop_at": 5},
            "stop_at: close: called from a request's callback":
                {"stop_at": lambda token: engine.close()},
            "on_logits: ValueError: assignment destination is read-only":
                {"on_logits": lambda position, row: row.fill(0.0)},
        }
        for says, asked in cases.items():
            good, bad = engine.submit(other), engine.submit(mine, **asked)
            result = bad.result(LIMIT_S)
            assert (result.finish_reason, result.tokens) == ("error", ())
            assert (result.error or "").startswith(says), result.error
            assert good.result(LIMIT_S).tokens == alone(other)[0], says
        assert engine.failure is None


@pytest.mark.rule("ENGINE-13")
@both
def test_an_answer_is_taken_for_its_truth_and_logged_as_that(kind: str, tmp_path: Path) -> None:
    asked = request(1, 7, 3)
    tokens, _ = alone(asked)
    with one_of(kind, log=tmp_path / "log") as engine:
        for answer in (object(), float("nan"), float("inf"), {"a": object()}, np.bool_(True), "no"):
            got = engine.submit(asked, stop_at=lambda token, it=answer: it).result(LIMIT_S)
            assert (got.tokens, got.finish_reason) == (tokens[:1], "stop")
        for answer in (None, 0, "", np.bool_(False)):
            got = engine.submit(asked, stop_at=lambda token, it=answer: it).result(LIMIT_S)
            assert (got.tokens, got.finish_reason) == (tokens, "length")
    log = read_log(tmp_path / "log")
    stops = {r["stop"] for r in log.records if r.get("event") == "Sampled"}
    assert log.complete
    assert stops == {True, False}


@pytest.mark.rule("ENGINE-7")
def test_nobody_can_wait_for_the_readable_engine_from_within_it() -> None:
    first, second = request(1, 3, 4), request(2, 5, 4)
    with one_of("reference") as engine:
        good = engine.submit(second)
        bad = engine.submit(first, stop_at=lambda token: good.result())
        result = bad.result()
        assert result.finish_reason == "error"
        assert "called from a request's callback" in (result.error or "")
        more: list[Any] = []
        asking = engine.submit(first, stop_at=lambda token: more.append(engine.submit(second)))
        assert asking.result().tokens == alone(first)[0], "new requests are welcome there"
        for handle in (good, *more):
            assert handle.result().tokens == alone(second)[0]


@pytest.mark.rule("ENGINE-7", "ADMIT-1")
def test_requests_of_the_readable_engine_arrive_by_their_time() -> None:
    asked = [request(i, 3, 4, arrival_s=at) for i, at in enumerate((5.0, 1.0, 5.0, 7.0, 0.0))]
    with one_of("reference") as engine:
        handles = engine.submit_all(asked)
        handles[2].cancel()
        results = [h.result() for h in handles[:3]]
        assert [h.number for h in handles[:3]] == [2, 1, 3], "in order of arrival"
        assert [r.finish_reason for r in results] == ["length", "length", "cancelled"]
        assert results[0].tokens == alone(request(0, 3, 4))[0]
    assert handles[3].result().finish_reason == "cancelled"


@pytest.mark.rule("ENGINE-7")
def test_when_the_readable_engine_breaks_all_that_is_open_ends(tmp_path: Path) -> None:
    with ReferenceEngine.open(checkpoint(), log=tmp_path / "log", **SHARED) as engine:
        handles = engine.submit_all([request(i, 3, 4) for i in range(2)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.executor, "run", raising(ZeroDivisionError("a bug")))
            with pytest.raises(ZeroDivisionError):
                handles[0].result()
        for handle in handles:
            said = handle.result()
            assert said.finish_reason == "error"
            assert said.error == "the engine failed: ZeroDivisionError: a bug"
        with pytest.raises(CoveyError, match="the engine failed: ZeroDivisionError: a bug"):
            engine.submit(request(3, 3, 4))
    assert not read_log(tmp_path / "log").complete


# -- a predictor ---------------------------------------------------------------------------------


class Harmful(Predictor):
    """Says at each Routed what it is told to say of the first layer of the next chunk."""

    say_this: Callable[[Visit], Any]

    def routed(self, visit: Visit, experts: Any, tokens: Any = (), gates: Any = None) -> Any:
        return self.say_this(visit._replace(chunk=visit.chunk + 1, layer=self.layers[0]))


def one(visit: Visit, *pairs: tuple[Any, Any]) -> list[Predicted]:
    return [Predicted(visit, pairs or ((1, 1.0),))]


HARM: dict[str, Callable[[Visit], Any]] = {
    "raises": raising(RuntimeError("boom")),
    "nothing": lambda v: None,
    "no event": lambda v: ["hi"],
    "expert": lambda v: one(v, (99, 1.0)),
    "negative": lambda v: one(v, (-1, 1.0)),
    "twice": lambda v: one(v, (1, 1.0), (1, 0.5)),
    "half": lambda v: one(v, (1.5, 1.0)),
    "layer": lambda v: one(v._replace(layer=77)),
    "request": lambda v: one(v._replace(request=9999)),
    "chunk": lambda v: one(v._replace(chunk=-5)),
    "nan": lambda v: one(v, (1, float("nan"))),
    "inf": lambda v: one(v, (1, float("inf"))),
}


@pytest.mark.rule("PREDICT-1", "PREDICT-10")
@pytest.mark.parametrize("harm", HARM)
def test_no_predictor_harms_the_readable_engine(
    harm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_harmless("reference", harm, monkeypatch)
    said = capsys.readouterr().err
    assert said.count("from here on nothing is guessed") == 1 == said.count("\n")


@pytest.mark.rule("PREDICT-1", "PREDICT-10")
@pytest.mark.parametrize("harm", ["raises", "nothing", "request", "nan"])
def test_no_predictor_harms_the_jax_engine(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    totals = check_harmless("jax", harm, monkeypatch, warn=said.append)
    assert said == [totals["prediction"]["gave_up"]]
    assert said[0].startswith("prefetch: Harmful: ")


def check_harmless(kind: str, harm: str, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Tokens are what they are without a predictor. Gives the engine's totals."""
    patch.setattr(Harmful, "say_this", staticmethod(HARM[harm]), raising=False)
    where = jax_impl.engine if kind == "jax" else reference.engine
    patch.setattr(where, "predictor", lambda name, control: Harmful(control))
    asked = [request(i, 3 + i, 4) for i in range(3)]
    with one_of(kind, prefetch="token", **options) as engine:
        for handle, r in zip(engine.submit_all(asked), asked, strict=True):
            assert handle.result(LIMIT_S).tokens == alone(r)[0], harm
        return engine.totals()


def test_where_a_predictor_is_the_subject_it_is_not_forgiven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulator measures predictors: it stops at one that is wrong."""
    from reference.simulator import models, run

    model = models.load("olmoe-1b-7b")
    for harm, error in (("raises", RuntimeError), ("expert", IllegalEvent)):
        monkeypatch.setattr(Harmful, "say_this", staticmethod(HARM[harm]), raising=False)
        monkeypatch.setattr(run, "simulated", lambda *_: Harmful(_[1]))
        options = run.control(model, 0.5, 2, grouping="lockstep", prefetch=4)
        with pytest.raises(error):
            run.simulate(None, model, run.routes_for(model), options, requests=2, tokens=4,
                         warm_up=1, predict="perfect", costs=CostModel())  # fmt: skip


# -- a disk that is full -------------------------------------------------------------------------


@pytest.mark.rule("LOG-5", "APP-3")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@both
def test_quiet_does_not_silence_that_the_log_is_incomplete(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_text('{"prompt": [1], "max_new_tokens": 2}\n')
    words = ["run", str(checkpoint()), "--requests", str(tmp_path / "f"), "--quiet", "--engine",
             kind, "--log", "/dev/full"]  # fmt: skip
    assert main(words) == 0
    err = capfd.readouterr().err
    assert err == "/dev/full: No space left on device; the event log is incomplete\n"
