"""Seeded faults in sampling, numerics and files: each dies of the tests of the rule it declares.

`python -m property_tests.rule_mutants [NAME ..]` judges each in a process of its own, in which the
module has the fault under its own name and only the tests marked with the rule run, in one file.
One JSON object a line: name, declared, killed_by (the first test that fails, or null), seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from oracle.patching import Mutant, planted

SAMPLING, ROUTER, ATTENTION = (
    "reference.sampling", "reference.numerics.router", "reference.numerics.attention",
)  # fmt: skip
NORMS, ROPE = "reference.numerics.norms", "reference.numerics.rope"
JSON, HEADER = "reference.files.strict_json", "reference.files.safetensors_header"
TESTS = {
    SAMPLING: "test_sampling.py", ROUTER: "test_numerics.py", ATTENTION: "test_numerics.py",
    NORMS: "test_numerics.py", ROPE: "test_numerics.py", JSON: "test_files.py",
    HEADER: "test_files.py",
}  # fmt: skip


def _m(name: str, module: str, old: str, new: str, rule: str, tests: str = "") -> Mutant:
    return Mutant(name, module, old, new, rule, (tests or TESTS[module],))


RULE_MUTANTS: tuple[Mutant, ...] = (
    # Sampling
    _m("nan-logits-sampled", SAMPLING, "if not np.isfinite(row.max(initial=-np.inf)):",
       "if False:", "SAMPLE-1"),
    _m("greedy-takes-last", SAMPLING, "int(row.argmax())",
       "len(row) - 1 - int(row[::-1].argmax())", "SAMPLE-2"),
    _m("temperature-multiplied", SAMPLING, "(logits - logits.max()) / temperature",
       "(logits - logits.max()) * temperature", "SAMPLE-3"),
    _m("top-k-one-more", SAMPLING, "tokens = best(scores, top_k)",
       "tokens = best(scores, top_k + 1)", "SAMPLE-4"),
    _m("top-p-one-less", SAMPLING, "count = 1 + int(", "count = int(", "SAMPLE-4"),
    _m("seed-ignored", SAMPLING, "(seed & _MASK, 0))[0]", "(0, 0))[0]", "SAMPLE-5"),
    _m("position-ignored", SAMPLING, "(position & _MASK, 0, 0, 0)", "(0, 0, 0, 0)", "SAMPLE-5"),
    _m("penalty-forgets-prompt", SAMPLING, "np.unique(np.asarray(tokens, np.int64))",
       "np.unique(np.asarray(tokens[prompt:], np.int64))", "SAMPLE-7",
       "test_sampling_controls.py"),
    _m("min-p-excludes-equal", SAMPLING, "weights >= min_p", "weights > min_p", "SAMPLE-8",
       "test_sampling_controls.py"),
    # Numerics
    _m("ties-to-higher-index", ROUTER, 'np.argsort(-scores, kind="stable")[:k]',
       'np.argsort(scores, kind="stable")[::-1][:k]', "ROUTE-2"),
    _m("never-renormalised", ROUTER, "if spec.renormalise:", "if False:", "ROUTE-3"),
    _m("nan-score-routed", ROUTER, "if np.isnan(scores).any():", "if False:", "ROUTE-4"),
    _m("softmax-over-all", ROUTER, 'softmax(logits[experts]) if spec.score == "topk_softmax"',
       'scores[experts] if spec.score == "topk_softmax"', "ROUTE-1"),
    _m("norm-without-eps", NORMS, "np.sqrt(mean + kind(eps))", "np.sqrt(mean)", "NUM-4"),
    _m("rope-exponent", ROPE, "dtype=np.float64) / spec.dims",
       "dtype=np.float64) / (spec.dims + 2)", "NUM-5"),
    _m("window-one-more", ATTENTION, "max(0, position - window + 1)\n    done",
       "max(0, position - window)\n    done", "ATTN-4"),
    _m("merge-keeps-old-peak", ATTENTION, "np.exp(a.peak - peak), np.exp(b.peak - peak)",
       "np.exp(a.peak - a.peak), np.exp(b.peak - peak)", "ATTN-3"),
    _m("block-order", ATTENTION, "range(first // kv.block, -(-position // kv.block)):",
       "reversed(range(first // kv.block, -(-position // kv.block))):", "ATTN-2"),
    # Files
    _m("key-twice", JSON, "if len(out) != len(pairs):", "if False:", "FILE-2"),
    _m("nesting-unbounded", JSON, "if depth > max_depth and", "if False and", "FILE-2"),
    _m("header-unbounded", HEADER, "if length > MAX_HEADER:", "if False:", "FILE-5"),
    _m("hole-in-data", HEADER, "if begin != reached:", "if begin < reached:", "FILE-6"),
    _m("trailing-bytes", HEADER, "if reached != data:", "if reached > data:", "FILE-6"),
    _m("shape-not-checked", HEADER, "if nbits != 8 * (end - begin):", "if False:", "FILE-5"),
)  # fmt: skip


class _Chosen:
    """A pytest plugin: only tests with the rule; remembers the first failure."""

    def __init__(self, rule: str) -> None:
        self.rule, self.failed, self.ran = rule, "", 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep what is marked."""
        items[:] = [
            i for i in items if any(self.rule in m.args for m in i.iter_markers("rule"))
        ]  # fmt: skip

    def pytest_runtest_logreport(self, report: Any) -> None:
        """The first failure names the killer; the collection of a file may fail too."""
        self.ran += report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid.split("::")[-1]


def judge(mutant: Mutant) -> str:
    """The test that kills it, "" if none. Runs in a child of this process."""
    import pytest

    read, write = os.pipe()
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        planted(mutant)
        chosen = _Chosen(mutant.declared)
        arguments = ["-x", "-q", "-p", "no:cacheprovider", f"property_tests/{mutant.scopes[0]}"]
        status = pytest.main(arguments, plugins=[chosen])
        text = chosen.failed or ("" if not status else f"pytest ends with {int(status)}")
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def verdicts(names: list[str]) -> Iterator[dict[str, Any]]:
    """One after another."""
    for mutant in RULE_MUTANTS:
        if not names or mutant.name in names:
            began = time.perf_counter()
            killer = judge(mutant)
            yield {
                "name": mutant.name,
                "declared": mutant.declared,
                "killed_by": killer or None,
                "seconds": round(time.perf_counter() - began, 3),
            }


if __name__ == "__main__":
    for one in verdicts(sys.argv[1:]):
        print(json.dumps(one), flush=True)
