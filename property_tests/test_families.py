"""Every family and packed format, from one table, on every engine.

An engine is added by one line in ENGINES; what it opens is the public API.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from jax_impl.engine import JaxEngine
from oracle import golden
from oracle.checkpoint_edit import permute_experts, permute_heads
from oracle.family_variants import FAMILY_VARIANTS, by_name
from oracle.golden import NEW_TOKENS, TOLERANCE, Answer, compare, judge, through
from oracle.tiny import FAMILIES
from property_tests.engines import COMPILED
from reference.engine import ReferenceEngine
from reference.files.families import families
from reference.files.requests import Request

ENGINES: dict[str, Callable[..., Any]] = {
    "reference": ReferenceEngine.open,
    "jax": partial(JaxEngine.open, compile_cache=COMPILED),
}
OPTIONS: dict[str, Any] = {
    "memory": "40%", "ignore_eos": True, "kv_block": 8, "chunk": 8, "max_running": 4,
    "max_rows": 16,
}  # fmt: skip
NAMES = [v.name for v in FAMILY_VARIANTS]
EACH = (
    *(f"{family}-plain" for family in FAMILIES),
    "qwen2_moe-window", "deepseek_v3-fp8", "qwen3-fp8", "minimax_m2-fp8", "gpt_oss-mxfp4",
    "mistral-dynamic", "phimoe-longrope",
)  # fmt: skip
"""One variant a family, and of every packed format and every rope that follows the prompt."""
COMPILED_IN_CI = {
    "mistral-dynamic", "qwen3-fp8", "olmoe-plain", "qwen2_moe-plain", "deepseek_v2-plain",
    "deepseek_v3-fp8", "glm4_moe-plain", "dots1-plain", "minimax_m2-fp8", "ernie4_5_moe-plain",
    "granitemoe-plain", "phimoe-longrope", "gpt_oss-mxfp4",
}  # fmt: skip
"""Compiling is what takes time: every kernel once, in each family that test_goldens has not."""


def cases(names: Iterable[str], also: Callable[[str], bool] = COMPILED_IN_CI.__contains__) -> Any:
    """(engine, variant) pairs; those of the compiled engine are slow unless `also` wants them."""
    return pytest.mark.parametrize(
        ("kind", "name"),
        [
            pytest.param(k, n, marks=[pytest.mark.slow] if k == "jax" and not also(n) else [])
            for k in ENGINES
            for n in names
        ],
    )


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a variant, written once a session."""
    root = tmp_path_factory.mktemp("families")
    return cache(lambda name: by_name(name).write(root / name))


def run(kind: str, path: Path, prompts: list[list[int]], new: int, **options: Any) -> list[Answer]:
    return through(lambda p: ENGINES[kind](p, **(OPTIONS | options)))(path, prompts, new)


def routes(name: str) -> bool:
    """Whether a variant has routed experts."""
    return bool(families()[by_name(name).family].layouts)


def alone(kind: str, path: Path, prompts: list[list[int]], new: int) -> list[Answer]:
    """One prompt after another, each by itself, with every expert resident."""
    options = OPTIONS | {"memory": "100%", "chunk": 16}
    answers = []
    with ENGINES[kind](path, **options) as engine:
        for n, prompt in enumerate(prompts):
            asked = Request(str(n), tuple(prompt), new)
            result = engine.submit(asked, logits=True).result(60)
            assert result.error is None
            answers.append(Answer(result.logits[: len(prompt)], list(result.tokens)))
    return answers


def test_the_table_is_whole() -> None:
    assert golden.names("families") == NAMES
    assert len(NAMES) >= 80
    assert set(FAMILIES) == set(families())
    assert {by_name(name).family for name in EACH} == set(FAMILIES)
    in_ci = {by_name(name).family for name in COMPILED_IN_CI}
    assert in_ci | {"llama", "mixtral", "qwen3_moe"} == set(FAMILIES)
    assert set(EACH) >= COMPILED_IN_CI


@pytest.mark.rule(
    "NUM-10", "NUM-13", "NUM-14", "NUM-15", "NUM-16", "NUM-17", "NUM-18", "NUM-19", "ATTN-7",
    "ATTN-8", "ROUTE-6", "ROUTE-7", "ROUTE-8", "MODEL-14", "MODEL-15", "MODEL-17",
)  # fmt: skip
@cases(NAMES)
def test_an_engine_says_what_transformers_said(
    kind: str, name: str, written: Callable[[str], Path]
) -> None:
    """Three requests at once under a budget, in prompt chunks. Measured: at most 4.8e-6."""
    engine = through(lambda path: ENGINES[kind](path, **OPTIONS))
    verdict = compare(name, written(name), engine)
    assert verdict.good, verdict
    assert verdict.error < TOLERANCE / 10, verdict


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="transformers or torch is not installed: the stored answers are used",
)
@pytest.mark.rule("NUM-10")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("default")
def test_transformers_still_says_so(name: str, written: Callable[[str], Path]) -> None:
    from oracle.make_goldens import transformers_engine

    live = transformers_engine(written(name), golden.golden(name).prompts, NEW_TOKENS)
    assert judge(golden.golden(name).answers, live).error < TOLERANCE / 10


SAME = {
    "mistral-yarn-one-mscale", "llama-yarn-mscales-old", "mistral-plain", "mistral-no-window",
    "qwen3-window-unused", "deepseek_v2-method-absent",
}  # fmt: skip
"""Variants that say the same as another in other words."""


def test_the_variants_are_different_functions() -> None:
    """A respect that changed nothing would not be tested by its variant."""
    seen: dict[bytes, str] = {}
    for name in NAMES:
        logits = golden.golden(name).answers[-1].logits
        bits = (logits / logits.std()).round(3).tobytes()
        assert (bits in seen) == (name in SAME), (name, seen.get(bits))
        seen[bits] = name


# What must not matter


@pytest.mark.rule("NUM-9", "NUM-12", "NUM-20")
@cases(EACH)
def test_company_chunks_and_budget_do_not_show(
    kind: str, name: str, written: Callable[[str], Path]
) -> None:
    """Alone with everything resident; then together, under budgets, in chunks: the same bits."""
    path, prompts = written(name), golden.golden(name).prompts
    single = alone(kind, path, prompts, 5)
    ways: list[dict[str, Any]] = [
        {"memory": "60%", "chunk": 5, "scheduler": "lockstep", "readiness": "expert"}
    ]
    if kind == "reference":
        ways.append({"memory": "40%", "chunk": 1})
    for options in ways:
        together = run(kind, path, prompts[::-1], 5, **options)[::-1]
        for a, b in zip(single, together, strict=True):
            assert a.tokens == b.tokens, options
            assert a.logits.tobytes() == b.logits.tobytes(), options


@pytest.mark.rule("NUM-9")
@cases(EACH, also={"qwen2_moe-plain", "deepseek_v3-fp8", "gpt_oss-mxfp4"}.__contains__)
def test_generating_equals_scoring_again(
    kind: str, name: str, written: Callable[[str], Path]
) -> None:
    """Texts are kept below the length from which angles follow the prompt's."""
    prompt = (5, 6, 7, 8)
    with ENGINES[kind](written(name), **OPTIONS) as engine:
        first = engine.submit(Request("w", prompt, 11), logits=True).result(60)
        text = (*prompt, *first.tokens)
        again = engine.submit(Request("s", text, 0), logits=True).result(60)
    assert first.error is None
    assert again.logits[:-1].tobytes() == first.logits.tobytes()


ROUTERS = {
    "olmoe-plain", "deepseek_v2-plain", "deepseek_v3-fp8", "minimax_m2-fp8", "ernie4_5_moe-plain",
    "phimoe-longrope", "gpt_oss-mxfp4",
}  # fmt: skip
"""Every kind of router once."""


def routed(kind: str, path: Path, prompts: list[list[int]]) -> dict[tuple[int, ...], Any]:
    """The experts that every visit of a run named, by request, chunk and layer."""
    with ENGINES[kind](path, **(OPTIONS | {"chunk": 16, "keep_log": True})) as engine:
        for handle in [engine.submit(Request(str(n), tuple(p), 4)) for n, p in enumerate(prompts)]:
            assert handle.result(60).error is None
        records = engine.records
    return {tuple(r["visit"]): r["experts"] for r in records if r.get("event") == "Routed"}


@pytest.mark.rule("ROUTE-1", "ROUTE-2", "JAX-16")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ROUTERS else [pytest.mark.slow])
             for n in EACH if routes(n)],
)  # fmt: skip
def test_both_engines_choose_the_same_experts(name: str, written: Callable[[str], Path]) -> None:
    """In the same order, in every layer, for every token: no margin in this table is as small as
    what the engines differ by."""
    prompts = golden.golden(name).prompts
    one, other = (routed(kind, written(name), prompts) for kind in ("reference", "jax"))
    assert one == other
    assert len(one) >= 3 * 4


@pytest.mark.rule("ROUTE-2", "ROUTE-6")
@cases([n for n in EACH if routes(n)], also=lambda _: False)
def test_experts_in_another_order(
    kind: str, name: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Experts and the rows of their router permuted together, group by group."""
    other = permute_experts(written(name), tmp_path / "permuted", seed=3)
    prompts = golden.golden(name).prompts
    verdict = judge(golden.golden(name).answers, run(kind, other, prompts, NEW_TOKENS))
    assert verdict.good, verdict
    assert verdict.error < TOLERANCE / 10, verdict


@pytest.mark.parametrize("kind", ["reference"])
def test_experts_without_their_router_would_be_seen(
    kind: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    path = permute_experts(written("dots1-plain"), tmp_path / "x", seed=3, router=False)
    want = golden.golden("dots1-plain")
    assert not judge(want.answers, run(kind, path, want.prompts, NEW_TOKENS)).good


@pytest.mark.rule("ATTN-5", "ATTN-6", "ATTN-7", "ATTN-8")
@cases([n for n in EACH if "fp8" not in n], also=lambda _: False)
def test_heads_in_another_order(
    kind: str, name: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Key/value heads with their query heads, and the columns of the output, permuted together."""
    other = permute_heads(written(name), tmp_path / "permuted", seed=5)
    prompts = golden.golden(name).prompts
    verdict = judge(golden.golden(name).answers, run(kind, other, prompts, NEW_TOKENS))
    assert verdict.good, verdict
    assert verdict.error < TOLERANCE / 10, verdict
