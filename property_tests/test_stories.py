"""The trained model recast as a mixture: the published text, from routers that really choose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from jax_impl.engine import JaxEngine
from oracle import stories
from oracle.checkers import check_log
from oracle.stories import (
    BOS,
    EXPERTS,
    GOLDEN_STEPS,
    GOLDEN_TEXT,
    Layout,
    decode,
    dense_tensors,
    half_split,
    write_stories_moe,
)
from property_tests.engines import COMPILED
from reference.engine import ReferenceEngine
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.numerics.formats import Array
from reference.numerics.model import Model
from reference.numerics.naive import Experts, naive_greedy, remembering, run_chunk
from reference.vocab.errors import BadInput
from reference.vocab.ids import ExpertKey

pytestmark = pytest.mark.skipif(
    not stories.available(), reason=f"the model's files are not in {stories.SOURCE}"
)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_the_published_text(layout: Layout, tmp_path: Path) -> None:
    ckpt = Checkpoint.open(write_stories_moe(tmp_path, layout))
    assert (ckpt.config.experts, ckpt.config.top_k) == ((0, 0) if layout == "dense" else (32, 4))
    assert decode(naive_greedy(ckpt, [BOS], GOLDEN_STEPS)) == GOLDEN_TEXT


@pytest.mark.parametrize("engine", [ReferenceEngine, JaxEngine])
def test_the_published_text_under_a_quarter_of_the_experts(engine: Any, tmp_path: Path) -> None:
    """Eight requests at once, each from another place in the text, in slots for 40 of 160."""
    path = write_stories_moe(tmp_path, "slices")
    text = [BOS, *naive_greedy(Checkpoint.open(path), [BOS], GOLDEN_STEPS)]
    starts = (1, 110, 140, 160, 170, 180, 185, 190)
    options = {"compile_cache": COMPILED} if engine is JaxEngine else {}
    with engine.open(
        path, memory="25%", keep_log=True, max_running=8, chunk=16, kv_tokens=8 * 256, **options
    ) as e:
        handles = [e.submit(Request(str(n), tuple(text[:n]), GOLDEN_STEPS + 1 - n)) for n in starts]
        results = [h.result(timeout_s=120) for h in handles]
    for n, result in zip(starts, results, strict=True):
        assert decode([*text[1:n], *result.tokens]) == GOLDEN_TEXT, n
    records = e.records
    assert records[0]["options"]["slots"] == 40
    loads = [r["key"] for r in records if r.get("action") == "Load"]
    assert len({tuple(key) for key in loads}) > 150  # of 160: nearly all were needed
    assert len(loads) > 1000  # and came again and again
    assert check_log(records) == []


def routed(ckpt: Checkpoint, experts: Experts | None = None, steps: int = 200) -> tuple:
    """Greedy text; for each layer how often an expert and a set of experts was chosen; weights."""
    model = Model(ckpt)
    state, fed, out = model.start(), [BOS], []
    used: list[Counter[int]] = [Counter() for _ in ckpt.config.layers]
    sets: list[Counter[tuple[int, ...]]] = [Counter() for _ in ckpt.config.layers]
    weights: list[np.ndarray] = []
    read = experts or remembering(model)
    while len(out) < steps:
        h = model.enter(state, fed, state.length, "last")
        while h.layer is not None:
            ids = h.topk[0].tolist()
            used[h.layer].update(ids)
            sets[h.layer][tuple(sorted(ids))] += 1
            weights.append(h.weights[0])
            y = [model.expert(h.layer, read(ExpertKey(h.layer, e)), h.x[0]) for e in ids]
            h = model.advance(state, h, np.array([y]), "last")
        assert h.logits is not None
        fed = [int(h.logits[0].argmax())]
        out += fed
    return decode(out), used, sets, np.stack(weights)


def test_slices_are_chosen_once_each_with_equal_weights(tmp_path: Path) -> None:
    ckpt = Checkpoint.open(write_stories_moe(tmp_path, "slices"))
    text, used, sets, weights = routed(ckpt)
    assert text == GOLDEN_TEXT
    assert np.abs(weights - 0.25).max() < 1e-6
    for layer in range(5):
        assert len(used[layer]) == EXPERTS
        # Eight copies of four slices: eight sets, none of which share an expert.
        assert len(sets[layer]) == 8
        assert len({e for s in sets[layer] for e in s}) == EXPERTS
        assert max(sets[layer].values()) < 0.6 * 200


def test_clones_are_chosen_freely(tmp_path: Path) -> None:
    text, used, sets, weights = routed(Checkpoint.open(write_stories_moe(tmp_path, "clones")))
    assert text == GOLDEN_TEXT
    assert all(len(u) >= 30 for u in used)
    assert all(len(s) > 100 for s in sets)
    assert np.allclose(weights.sum(axis=1), 1) and weights.std() > 0.1


def test_a_wrong_slice_shows_and_another_copy_of_it_does_not(tmp_path: Path) -> None:
    ckpt = Checkpoint.open(write_stories_moe(tmp_path, "slices"))
    model = Model(ckpt)
    _, _, sets, _ = routed(ckpt, steps=20)
    good = remembering(model)
    busiest = max(sets[2], key=lambda s: sets[2][s])
    victim, mate = ExpertKey(2, busiest[0]), ExpertKey(2, busiest[1])

    start = decode(naive_greedy(ckpt, [BOS], 80))
    assert GOLDEN_TEXT.startswith(start)

    def text(broken: Experts) -> str:
        return routed(ckpt, lambda key: broken(key) if key == victim else good(key), 80)[0]

    def zeroed(key: ExpertKey) -> tuple[Array, ...]:
        return tuple(np.zeros_like(a) for a in model.read_expert(key))

    assert text(good) == start
    assert text(zeroed) != start
    assert text(lambda key: good(mate)) != start
    assert text(lambda key: good(ExpertKey(3, key.expert))) != start
    # A copy of the same slice: the same sum of neurons in another order, in other bytes.
    total = good(victim)[2].astype(np.float64).sum(axis=1)
    copies = [
        key
        for key in (ExpertKey(2, e) for e in range(EXPERTS))
        if key != victim and np.allclose(good(key)[2].astype(np.float64).sum(axis=1), total)
    ]
    assert len(copies) == 7
    assert not np.array_equal(good(copies[0])[0], good(victim)[0])
    assert text(lambda key: good(copies[0])) == start


def test_recasting_changes_the_logits_by_rounding_only(tmp_path: Path) -> None:
    dense = Checkpoint.open(write_stories_moe(tmp_path / "dense", "dense"))
    tokens = naive_greedy(dense, [BOS], 40)
    models = [Model(dense)]
    for layout in ("slices", "clones"):
        models.append(Model(Checkpoint.open(write_stories_moe(tmp_path / layout, layout, seed=5))))
    logits = [run_chunk(m, m.start(), [BOS, *tokens], 0, remembering(m)) for m in models]
    assert logits[0] is not None
    for other in logits[1:]:
        assert other is not None
        assert 0 < np.abs(other - logits[0]).max() < 1e-4 * logits[0].std()


def test_writing_is_repeatable_and_seeded(tmp_path: Path) -> None:
    def data(name: str, seed: int) -> bytes:
        return (write_stories_moe(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()

    first = data("a", 0)
    assert first == data("b", 0)
    assert first != data("c", 1)


def test_half_split_takes_the_pairs_apart() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of width 4: pairs 01 23, 45 67
    assert half_split(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    n, t = dense_tensors()
    assert t["embed"].shape == (n["vocab"], n["dim"]) == (512, 64)


def test_other_source_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / stories.WEIGHTS).write_bytes(b"\0" * 100)
    monkeypatch.setattr(stories, "SOURCE", tmp_path)
    assert not stories.available()
    with pytest.raises(BadInput, match="sha256"):
        dense_tensors()
    with pytest.raises(OSError, match="tok512"):
        stories.vocabulary()


def test_text_of_tokens() -> None:
    words = stories.vocabulary()
    assert len(words) == 512
    assert words[13] == b"\n"  # <0x0A>
    assert (words[259], words[260]) == (b" t", b"he")
    assert decode([259, 260, 13, 259]) == "the\n t"  # only the first space goes
