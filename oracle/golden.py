"""Stored answers of transformers, and the comparison of any engine with them (NUM-10).

There are two sets, `variants` and `families`. `oracle/goldens/<set>.json` says for each variant
how its weights hash and which tokens follow each prompt greedily, `<set>.safetensors` beside it
holds its logits under `<variant>/<n>`, float32 [len, V] for prompt n. `oracle/make_goldens.py`
makes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from reference.files.requests import Request
from reference.vocab.errors import RequestFailed

HERE = Path(__file__).parent / "goldens"
SETS = ("variants", "families")
NEW_TOKENS = 8
TOLERANCE = 1e-4
"""Greatest difference of a logit, in standard deviations of the variant's stored logits."""


@dataclass(frozen=True)
class Answer:
    """For one prompt: teacher-forced logits [len, V] and the greedy tokens that follow it."""

    logits: np.ndarray
    tokens: list[int]


Engine = Callable[[Path, list[list[int]], int], list[Answer]]
"""(checkpoint directory, prompts, new tokens) -> one answer a prompt; stop tokens are ignored."""


def through(open_engine: Callable[[Path], Any]) -> Engine:
    """The public engine API as an `Engine`: all prompts are submitted at once.

    open_engine(path) gives a ReferenceEngine or JaxEngine that ignores stop tokens.
    """

    def run(path: Path, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
        rows: list[dict[int, np.ndarray]] = [{} for _ in prompts]
        with open_engine(path) as engine:
            handles = [
                engine.submit(Request(str(n), tuple(p), new_tokens), on_logits=rows[n].__setitem__)
                for n, p in enumerate(prompts)
            ]
            results = [handle.result(timeout_s=120) for handle in handles]
        if errors := [r.error for r in results if r.finish_reason != "length"]:
            raise RequestFailed(str(errors))
        return [
            Answer(np.stack([rows[n][i] for i in range(len(p))]), list(results[n].tokens))
            for n, p in enumerate(prompts)
        ]

    return run


@dataclass(frozen=True)
class Golden:
    """What is stored for one variant."""

    weights: str
    prompts: list[list[int]]
    answers: list[Answer]


def weights_hash(path: Path) -> str:
    """sha256 over the weight files of a checkpoint directory, by name."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def _stored(which: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    manifest = json.loads((HERE / f"{which}.json").read_text("utf-8"))
    return manifest["variants"], load_file(HERE / f"{which}.safetensors")


def names(which: str = "variants") -> list[str]:
    """Variants of a set with stored answers, in the order in which they were made."""
    return list(_stored(which)[0])


def golden(name: str) -> Golden:
    """The stored answers of a variant of any set; KeyError if there are none."""
    which = next((w for w in SETS if name in _stored(w)[0]), SETS[0])
    entries, logits = _stored(which)
    entry = entries[name]
    answers = [Answer(logits[f"{name}/{n}"], tokens) for n, tokens in enumerate(entry["tokens"])]
    return Golden(entry["weights"], entry["prompts"], answers)


@dataclass(frozen=True)
class Verdict:
    """error: greatest logit difference in standard deviations; same_tokens: all greedy tokens."""

    error: float
    same_tokens: bool

    @property
    def good(self) -> bool:
        """Within NUM-10. A NaN is not."""
        return self.error <= TOLERANCE and self.same_tokens


def judge(want: list[Answer], got: list[Answer]) -> Verdict:
    """Compare answers prompt by prompt; shapes must be equal (else ValueError)."""
    deviation = float(np.concatenate([a.logits for a in want]).astype(np.float64).std())
    error = 0.0
    for a, b in zip(want, got, strict=True):
        if a.logits.shape != b.logits.shape:
            raise ValueError(f"logits {b.logits.shape}, stored {a.logits.shape}")
        worst = np.abs(a.logits.astype(np.float64) - b.logits).max() / deviation
        error = float(np.maximum(error, worst))  # keeps a NaN
    return Verdict(error, all(a.tokens == b.tokens for a, b in zip(want, got, strict=True)))


def compare(name: str, path: Path, engine: Engine) -> Verdict:
    """Run `engine` on the variant's checkpoint at `path` and judge it by the stored answers.

    ValueError if the checkpoint is not the one that the answers are of.
    """
    want = golden(name)
    if weights_hash(path) != want.weights:
        raise ValueError(f"{name}: other weights than those of the stored answers")
    return judge(want.answers, engine(path, want.prompts, NEW_TOKENS))
