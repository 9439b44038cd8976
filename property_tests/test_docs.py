"""The examples of README.md and docs/ run, and docs/api.md says what the code says."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from jax_impl.app.main import main
from jax_impl.engine import JaxEngine
from jax_impl.options import EngineOptions
from property_tests.doc_blocks import Example, examples, table
from reference.engine import ReferenceEngine
from reference.files.requests import Request
from reference.handle import RequestHandle, Result
from reference.simulator import platforms
from reference.vocab.options import (
    EVICTIONS,
    FETCH_ORDERS,
    PREFETCHERS,
    READINESS,
    SCHEDULERS,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOUND = [e for page in PAGES for e in examples(page.name, page.read_text(encoding="utf-8"))]
PYTHON = [e for e in FOUND if e.language == "python"]
REFERENCE = inspect.signature(ReferenceEngine).parameters  # before conftest.py wraps it
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples name."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "F").write_text('{"id": "a", "prompt": [1, 5, 7], "max_new_tokens": 4}\n')
    assert main(["trace", "record", "demo", "--requests", str(folder / "F"), "--quiet",
                 "-o", str(folder / "T.npz")]) == 0
    return folder


@pytest.mark.parametrize("page", dict.fromkeys(e.page for e in PYTHON))
def test_the_python_examples_of_a_page_run(page: str, place: Path) -> None:
    """As they stand, one after another in a process of their own, each with nothing of the others
    but what is imported and the number of devices, which the first one sets."""
    there = [f"exec(compile({e.text!r}, '{page}:{e.line}', 'exec'), {{}})"
             for e in PYTHON if e.page == page]
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(there)], cwd=place, capture_output=True, text=True,
        env=env | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_every_page_with_python_is_seen() -> None:
    """The README, and each page that imports something of ours, has an example that runs."""
    says = re.compile(r"^ {0,4}from (reference|jax_impl|oracle)\.[\w.]+ import", re.M)
    pages = {page.name for page in PAGES if says.search(page.read_text(encoding="utf-8"))}
    assert {"README.md", "api.md", "lamina.md", "simulator.md", "trace.md"} <= pages
    assert pages <= {e.page for e in PYTHON}


def test_examples_are_found_where_they_stand() -> None:
    text = "# A\n\n    import os\n\n    print(os)\n\nmore\n\n    covey run\n\n```toml\na = 1\n```\n"
    assert list(examples("a.md", text)) == [
        Example("a.md", 12, "toml", "a = 1\n"),
        Example("a.md", 3, "python", "import os\n\nprint(os)\n"),
    ]


def test_the_platform_of_the_page_is_one() -> None:
    (text,) = [e.text for e in FOUND if (e.page, e.language) == ("simulator.md", "toml")]
    assert platforms.parse("mine", text).sources["channel.depth"].startswith("assumed")


# docs/api.md


def words(cell: str) -> list[str]:
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_options_are_those_of_the_engines() -> None:
    """Name by name, with defaults, and which engine has it."""
    jax = {f.name: f.default for f in fields(EngineOptions)}
    numpy = {name: p.default for name, p in REFERENCE.items() if name != "path"}
    rows = table(API, "## Options of open")
    for name, default, where, _ in rows:
        (name,) = words(name)
        has = {"both": (True, True), "jax": (True, False), "reference": (False, True)}[where]
        assert (name in jax, name in numpy) == has, name
        for known in (jax, numpy):
            value = known.get(name, MISSING)
            if name in known and (name, value) != ("memory", "100%"):
                told = inspect.isroutine(value) or isinstance(value, type)
                assert words(default) == ([] if told else [repr(value)]), name
    assert {words(row[0])[0] for row in rows} == jax.keys() | numpy.keys()
    assert f'the reference\'s default is `"{numpy["memory"]}"`' in API


@pytest.mark.parametrize(
    ("option", "allowed"),
    [("scheduler", SCHEDULERS), ("cache", EVICTIONS), ("readiness", READINESS),
     ("fetch_order", FETCH_ORDERS), ("prefetch", PREFETCHERS)],
)
def test_the_words_of_an_option(option: str, allowed: tuple[str, ...]) -> None:
    (row,) = [row for row in table(API, "## Options of open") if row[0] == f"`{option}`"]
    assert set(words(row[3])) == set(allowed)


def public(kind: type) -> set[str]:
    """What a caller may use of a class, but `open`."""
    return {name for name in dir(kind) if not name.startswith("_")} - {"open"}


def test_the_methods_are_those_of_the_engines() -> None:
    rows = table(API, "## The engine")
    for kind, word in ((JaxEngine, "jax"), (ReferenceEngine, "reference")):
        said = {call.split("(")[0] for row in rows if row[1] in ("both", word)
                for call in words(row[0])}
        assert said == public(kind), kind
        for call in (c for row in rows if row[1] in ("both", word) for c in words(row[0])):
            name, _, given = call.partition("(")
            if given:
                own = list(inspect.signature(getattr(kind, name)).parameters)[1:]
                assert set(re.findall(r"\w+", given)) <= set(own), (kind, call)


def test_the_handle_the_result_and_the_request() -> None:
    rows = table(API, "## A handle")
    # What is left is the engine's side of it.
    ours = {"end", "put_logits", "put_token", "stops"}
    assert {c.split("(")[0] for row in rows for c in words(row[0])} == public(RequestHandle) - ours
    text = " ".join(API.split())
    for kind, begins in ((Result, "A result has "), (Request, "A `Request` has ")):
        said = words(text.split(begins)[1].split(" see [text]")[0].split(" A `Request`")[0])
        assert {f.name for f in fields(kind)} <= set(said), kind
