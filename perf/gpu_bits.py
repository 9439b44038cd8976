"""Does a row of a tile depend on the rows beside it? Asked of every executable of some models.

Texts run through `JaxModel` a token at a time and alone; then as one chunk, and beside others, at
several numbers of rows. Experts, weights and logits of every position must be the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_impl.model import ExpertTask, JaxModel
from jax_impl.stages import Table
from jax_impl.stored import dtype_of
from oracle.tiny import tiny_config, write_checkpoint
from reference.files.checkpoint import Checkpoint

LENGTH = 11
BLOCK = 4
COUNTS = (2, 3, 5, 8, 9, 17)
BIG = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16,
       "num_experts_per_tok": 4, "head_dim": 64, "vocab_size": 512}  # fmt: skip
MODELS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("qwen3_moe", "F32", {}, "f32"),
    ("qwen3_moe", "BF16", BIG, "f32"),
    ("qwen3_moe", "BF16", BIG, "bf16"),
    ("mixtral", "F16", {"sliding_window": 9}, "f32"),
    ("deepseek_v3", "BF16", {}, "f32"),
    ("gpt_oss", "BF16", {}, "f32"),
)
"""(family, stored type, changes to the tiny config, --compute); a quick check takes the first."""

Told = dict[tuple[int, int], list[bytes]]
"""(text, position) -> what every router and the head said of that row."""


def _experts(ckpt: Checkpoint) -> dict[tuple[int, int], tuple[jax.Array, ...]]:
    return {
        (layer, e): tuple(
            jax.device_put(np.array(ckpt.read(ref)).view(dtype_of(ref.dtype, "expert")))
            for ref in ckpt.expert(layer, e)
        )
        for layer in ckpt.config.moe_layers
        for e in range(ckpt.config.experts)
    }


class Runner:
    """One model; `run` lets some rows pass through it in one call a stage."""

    def __init__(self, ckpt: Checkpoint, compute: Any, texts: int) -> None:
        blocks = texts * -(-LENGTH // BLOCK)
        self.model = JaxModel(
            ckpt, rows=64, kv_blocks=blocks, max_len=LENGTH, kv_block=BLOCK, texts=texts,
            tile=8, wide=32, compute=compute,
        )  # fmt: skip
        self.model.compile()
        self.experts = _experts(ckpt)
        rng = np.random.default_rng(3)
        self.tokens = rng.integers(3, ckpt.config.vocab, (texts, LENGTH)).tolist()

    def table(self, text: int) -> Table:
        lists = []
        for kind in self.model.kinds:
            held = kind.held(LENGTH, BLOCK)
            lists.append([(text * held + i) % kind.blocks for i in range(held)])
        return Table(tuple(lists), LENGTH)

    def run(self, part: Sequence[tuple[int, int]], told: Told, first: int = 0) -> None:
        """`part`: (text, position) of each row; they lie in the bank from row `first` on."""
        rows = [(first + 7 * i) % self.model.rows for i in range(len(part))]
        where = [p for _, p in part]
        tables = [self.table(t) for t, _ in part]
        want = [True] * len(part)
        tokens = [self.tokens[t][p] for t, p in part]
        out = self.model.enter(rows, tokens, where, tables, want).get()
        while out.layer is not None:
            tasks: dict[int, tuple[list[int], list[int]]] = {}
            for i, row in enumerate(rows):
                told.setdefault(part[i], []).append(
                    out.topk[i].tobytes() + out.weights[i].tobytes()
                )
                for rank, expert in enumerate(out.topk[i].tolist()):
                    at, ranks = tasks.setdefault(expert, ([], []))
                    at.append(row)
                    ranks.append(rank)
            layer = out.layer
            self.model.experts(
                layer, [ExpertTask(self.experts[layer, e], *t) for e, t in tasks.items()]
            )
            out = self.model.advance(layer, rows, where, tables, want).get()
        for i, place in enumerate(part):
            told.setdefault(place, []).append(np.asarray(out.logits[i]).tobytes())


def differing(found: Told, alone: Told) -> list[list[int]]:
    """[text, position, which router or the head] of rows that said something else than alone."""
    return [
        [*place, next(i for i, (a, b) in enumerate(zip(said, alone[place], strict=True)) if a != b)]
        for place, said in sorted(found.items())
        if said != alone[place]
    ]


def check_model(folder: Path, spec: tuple[str, str, dict[str, Any], str]) -> dict[str, Any]:
    """Every row count of one model; `differing` is empty where all is well."""
    family, dtype, changes, compute = spec
    path = folder / "-".join((family, dtype, compute, str(len(changes))))
    write_checkpoint(path, tiny_config(family, **changes), dtype=dtype, seed=5)
    with Checkpoint.open(path) as ckpt:
        runner = Runner(ckpt, compute, max(COUNTS))
        alone: Told = {}
        for text in range(max(COUNTS)):
            for position in range(LENGTH):
                runner.run([(text, position)], alone)
        wrong: dict[str, list[list[int]]] = {}
        chunk: Told = {}
        runner.run([(0, p) for p in range(LENGTH)], chunk, 5)
        wrong["chunk"] = differing(chunk, alone)
        for count in COUNTS:
            told: Told = {}
            for position in range(LENGTH):
                runner.run([(t, position) for t in range(count)], told, 3 * position)
            wrong[str(count)] = differing(told, alone)
    rows = LENGTH * (1 + sum(COUNTS))
    return {
        "family": family, "dtype": dtype, "compute": compute, "hidden": ckpt.config.hidden,
        "executables": runner.model.programs, "wide": runner.model.wide, "rows": rows,
        "equal": not any(wrong.values()),
        "differing": {name: rows[:8] for name, rows in wrong.items() if rows},
        "differing_rows": {name: len(rows) for name, rows in wrong.items() if rows},
    }  # fmt: skip


def check_bits(folder: Path, quick: bool, left: Callable[[], float]) -> dict[str, Any]:
    """All models that the time allows."""
    models, skipped = [], []
    for spec in MODELS[:1] if quick else MODELS:
        if models and left() <= 0:
            skipped.append(list(spec))
        else:
            models.append(check_model(folder, spec))
    return {"models": models, "skipped": skipped, "ok": all(m["equal"] for m in models)}
