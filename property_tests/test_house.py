"""The project's own order: arrows, purity, sizes, rules, the wheel, the README.

Every check runs on the tree and, beside it, on a small sample that must fail it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from property_tests import house
from specs import status

ROOT = Path(__file__).resolve().parent.parent
SOURCES = house.python_files(ROOT)


def none(faults: list[str]) -> None:
    """Fails with one fault a line."""
    assert not faults, "\n" + "\n".join(faults)


# Arrows


def test_import_arrows() -> None:
    assert len(SOURCES) > 20
    none([fault for path, text in SOURCES.items() for fault in house.arrow_faults(path, text)])


@pytest.mark.parametrize(
    ("path", "source", "target"),
    [
        ("reference/vocab/ids.py", "from reference.control import x", "reference.control.x"),
        ("reference/vocab/ids.py", "import numpy", "numpy"),
        ("reference/control/cache.py", "from reference.files import event_log",
         "reference.files.event_log"),
        ("reference/control/cache.py", "import oracle", "oracle"),
        ("reference/control/cache.py", "from ..numerics import dot", "reference.numerics.dot"),
        ("reference/control/__init__.py", "from ..files import x", "reference.files.x"),
        ("reference/numerics/dot.py", "import jax.numpy as jnp", "jax.numpy"),
        ("reference/engine.py", "def f():\n    from jax_impl import model", "jax_impl.model"),
        ("reference/engine.py", "import safetensors", "safetensors"),
        ("jax_impl/model.py", "from reference.numerics import dot", "reference.numerics.dot"),
        ("jax_impl/model.py", "from reference import numerics", "reference.numerics"),
        ("jax_impl/model.py", "import reference", "reference"),
        ("jax_impl/model.py", "import oracle.tiny", "oracle.tiny"),
        ("jax_impl/app/run.py", "from reference.numerics.model import Model",
         "reference.numerics.model.Model"),
        ("jax_impl/app/run.py", "import torch", "torch"),
        ("oracle/checkers/slots.py", "from reference.control import scheduler",
         "reference.control.scheduler"),
        ("oracle/checkers/slots.py", "import oracle.subjects", "oracle.subjects"),
        ("oracle/explore.py", "import perf", "perf"),
    ],
)
def test_a_wrong_arrow_is_found(path: str, source: str, target: str) -> None:
    (fault,) = house.arrow_faults(path, source)
    assert fault.startswith(f"{path}:") and fault.endswith(f"import {target}")


def test_right_arrows_pass() -> None:
    good = "from __future__ import annotations\nimport ast\nfrom reference.vocab import ids\n"
    for path in ("reference/control/cache.py", "reference/files/x.py", "jax_impl/model.py",
                 "oracle/checkers/slots.py"):
        assert house.arrow_faults(path, good) == []
    app = "def f():\n    from reference.engine import ReferenceEngine\n    import oracle.checkers\n"
    assert house.arrow_faults("jax_impl/app/run.py", app) == []
    assert house.arrow_faults("reference/control/a.py", "from .cache import Cache") == []


def test_nothing_shadows_the_standard_library() -> None:
    none(house.shadowing(SOURCES))
    assert house.shadowing(["reference/files/json.py", "oracle/queue/__init__.py"]) == [
        "reference/files/json.py: json shadows the standard library",
        "oracle/queue/__init__.py: queue shadows the standard library",
    ]


# Purity of control


def test_control_is_pure() -> None:
    control = {p: t for p, t in SOURCES.items() if p.startswith("reference/control/")}
    assert control
    none([fault for path, text in control.items() for fault in house.purity_faults(path, text)])


@pytest.mark.parametrize(
    "source",
    ["import time", "from threading import Lock", "import random as r", "import os.path",
     "def f():\n    import datetime", "import numpy as np", "import asyncio",
     "def f(p):\n    return open(p)", "print(1)", "def key(x):\n    return hash(x)",
     "n = 0\ndef f():\n    global n\n    n += 1"],
)
def test_an_impure_control_is_found(source: str) -> None:
    assert len(house.purity_faults("reference/control/cache.py", source)) == 1


# Size


def test_modules_are_of_reading_size() -> None:
    tests = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8")
             for p in (ROOT / "property_tests").glob("*.py")}
    over, warn = house.size_faults({p: len(t.splitlines()) for p, t in SOURCES.items()})
    none(over)
    none(house.size_faults({p: len(t.splitlines()) // 2 for p, t in tests.items()})[0])
    for line in warn:
        print(f"longer than {house.MODULE_LINES_GOOD}: {line}")


def test_a_long_module_is_found() -> None:
    over, warn = house.size_faults({"a.py": 300, "b.py": 301, "c.py": 400, "d.py": 401})
    assert over == ["d.py: 401 lines, at most 400"]
    assert warn == ["b.py: 301 lines", "c.py: 400 lines"]


# Rules


def test_every_rule_is_cited_and_tested() -> None:
    rules = status.of_tree(ROOT)
    assert rules.texts, "specs/ defines no rule"
    none(rules.problems)


def test_status_is_current() -> None:
    printed = subprocess.run(
        [sys.executable, str(ROOT / "specs" / "status.py")], check=True, capture_output=True
    ).stdout.decode()
    assert (ROOT / "specs" / "STATUS.md").read_text(encoding="utf-8") == printed, "make status"


SPEC = ("specs/a.md",
        "# A\n**AAA-1** One.\n- **AAA-2** Two, see AAA-1 and UTF-8.\nMentions **AAA-1**.")
CODE = ("reference/a.py", '"""Obeys AAA-1."""\nx = AAA-7  # and AAA-2\n')
TEST = ("property_tests/test_a.py",
        'import pytest\n@pytest.mark.rule("AAA-1", "AAA-2")\ndef test_a(): pass\n')


def test_rules_that_fit_together() -> None:
    faults = [status.Fault("off-by-one", ("AAA-2", "AAA-1")), status.Fault("x", ("AAA-1",), ("s",))]
    judge = ("oracle/judge.py", 'def f():\n    return "S2", "AAA-2 is cited in text"\n')
    rules = status.collect([SPEC], [CODE, judge], [TEST], faults)
    assert rules.problems == []
    assert list(rules.texts) == ["AAA-1", "AAA-2"]
    table = status.render(rules)
    assert "| AAA-1 | [a.md](a.md) | a | - | - | - | a | s | off-by-one, x |" in table
    assert "| AAA-2 | [a.md](a.md) | a | - | judge | - | a | judge | off-by-one |" in table
    assert status.judged(judge[1]) == {"SAFE-2", "AAA-2"}
    counts = "2 rules, 2 cited by code, 2 declared by a test, 2 explored, 2 with a mutant."
    assert counts in table


@pytest.mark.parametrize(
    ("specs", "code", "tests", "problem"),
    [
        ([SPEC, ("specs/b.md", "**AAA-1** Again.")], [CODE], [TEST],
         "specs/b.md: AAA-1 is defined again (first in specs/a.md)"),
        ([SPEC, ("specs/b.md", "See BBB-3.")], [CODE], [TEST],
         "specs/b.md: mentions BBB-3, which no specs/*.md defines"),
        ([SPEC], [CODE, ("oracle/b.py", "# AAA-3\n")], [TEST],
         "oracle/b.py: cites AAA-3, which no specs/*.md defines"),
        ([SPEC], [CODE, ("oracle/b.py", "x = f'BBB-3 {1}'\n")], [TEST],
         "oracle/b.py: cites BBB-3, which no specs/*.md defines"),
        ([SPEC], [CODE], [TEST, ("property_tests/test_b.py",
                                 'pytestmark = [pytest.mark.rule("AAA-9")]\n')],
         "property_tests/test_b.py: tests AAA-9, which no specs/*.md defines"),
        ([SPEC], [("reference/a.py", "# AAA-1\nAAA = 3\ny = AAA-2\n")], [TEST],
         "specs/a.md: AAA-2 is cited by no code"),
        ([SPEC], [CODE], [("property_tests/test_a.py", '@pytest.mark.rule("AAA-1")\n'
                           'def test_a():\n    """AAA-2"""\n')],
         "specs/a.md: AAA-2 is declared by no test"),
    ],
)
def test_rules_that_do_not_fit_are_found(
    specs: list[tuple[str, str]], code: list[tuple[str, str]], tests: list[tuple[str, str]],
    problem: str,
) -> None:
    assert status.collect(specs, code, tests).problems == [problem]


# The wheel


def package_files() -> list[str]:
    """Every file of the three packages that is not a build product."""
    return [
        p.relative_to(ROOT).as_posix()
        for package in house.PACKAGES
        for p in (ROOT / package).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc"
    ]


def test_the_wheel_holds_the_packages_and_their_data(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("covey-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    none(house.wheel_faults(names, package_files()))
    assert any(re.fullmatch(r"reference/vocab/families/\w+\.toml", n) for n in names)


def test_a_wrong_wheel_is_found() -> None:
    meta = ["c.dist-info/licenses/LICENSE", "c.dist-info/entry_points.txt"]
    files = [f"{p}/py.typed" for p in house.PACKAGES] + ["reference/vocab/families/x.toml"]
    assert house.wheel_faults(files + meta, files) == []
    assert house.wheel_faults(files[:-1] + meta, files) == [
        "the wheel lacks reference/vocab/families/x.toml"]
    assert house.wheel_faults([*files, *meta, "perf/run.py"], files) == [
        "the wheel holds perf/run.py"]
    assert house.wheel_faults(files[1:] + meta, files[1:]) == [
        "the wheel has no reference/py.typed"]
    assert len(house.wheel_faults(files, files)) == 2


# The README and the settings


def commands() -> list[str]:
    """The commands that `covey --help` lists."""
    from jax_impl.app.main import COMMANDS

    return list(COMMANDS)


def unmentioned(readme: str, names: list[str]) -> list[str]:
    """Commands of which the README shows no use."""
    return [name for name in names if not re.search(rf"\bcovey {name}\b", readme)]


def test_the_readme_shows_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert unmentioned(readme, commands()) == []
    assert unmentioned("`covey run` and covey checker", ["run", "check"]) == ["check"]


def test_files_the_readme_names_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w./-]+)\)", readme)
    assert links
    assert [name for name in links if not (ROOT / name).exists()] == []


def test_pins_cover_the_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(project["dependencies"]) == [
        "jax>=0.10,<0.13", "jaxlib", "numpy", "safetensors"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[<>=]", item)[0].lower() for group in wanted for item in group}
    for lock in sorted((ROOT / "requirements").glob("dev-*.txt")):
        lines = [x for x in lock.read_text(encoding="utf-8").splitlines() if not x.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", x) for x in lines), lock
        assert names <= {x.split("==")[0].lower() for x in lines}, lock
