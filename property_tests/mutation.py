"""Who kills mechanical faults: every change of the control plane, and samples of the fast engine.

    python -m property_tests.mutation GROUP OUT [--seed 1] [--count N] [--jobs 1] [--most STAGE]

judges each change of the group (GROUPS) in a process of its own, in which the module has the
change under its own name. Judges come in stages, the cheapest first; what none of them notices
lives. OUT gets one JSON object a line: name, killed_by ("" for one that lives), stage, seconds;
changes that it has already are not judged again, but with --again those that live. The unchanged
modules are judged first (of a sample the first drawn one alone): it is an error when one is blamed.
The order is drawn from the seed, so any first part is a sample.
Survivors are explained in specs/mutation-control.md and specs/mutation-jax.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.patching import serve
from property_tests.changes import ROOT, Change, file_of, sample

_C = "reference.control."
CONTROL = tuple(
    _C + file.stem
    for file in sorted((ROOT / "reference" / "control").glob("*.py"))
    if not file.stem.startswith(("attention_", "host_tier", "__"))
)
TIERS = (_C + "host_tier",)
LAMINA = tuple(
    _C + file.stem for file in sorted((ROOT / "reference" / "control").glob("attention_*.py"))
)
TRANSFER = ("jax_impl.transfer", "jax_impl.slots")
ENGINE = ("jax_impl.holdings", "jax_impl.loop", "jax_impl.engine")

STILL = 6
"""So often in a row, five seconds apart, nothing has moved."""
Judge = Callable[[], str]
"""Says what is wrong, or ""."""


@dataclass(frozen=True)
class Stage:
    """seconds: CPU time after which a change counts as one that hangs; one that does nothing for
    half a minute does, too."""

    name: str
    judge: Judge
    seconds: float


def scopes(least: int, most: int) -> Judge:
    """Scopes of so many states against their pinned counts, the smallest first."""

    def judge() -> str:
        from oracle.explorer import explorer_of
        from oracle.pins import difference, read_pins
        from oracle.scopes import SCOPES

        pins = read_pins()
        size = {n: p["canonical_states"] for n, p in pins.items()}
        for name in sorted(size, key=size.__getitem__):
            if not least <= size[name] < most or SCOPES[name].any_policy:
                continue
            report = explorer_of(SCOPES[name], 2 * size[name] + 1000).run()
            if report.violations:
                return f"{report.violations[0].property} in {name}"
            if difference(report, pins):
                return f"count of {name}"
        return ""

    return judge


def walks(count: int) -> Judge:
    """Random walks, and their decisions against the pinned ones."""

    def judge() -> str:
        from oracle.walks import pinned, walk

        for seed, digest in enumerate(pinned()[:count]):
            one = walk(seed)
            if one.fault is not None:
                return f"{one.fault[0]} in walk {seed}"
            if one.digest != digest:
                return f"decisions of walk {seed}"
        return ""

    return judge


def plays(count: int) -> Judge:
    """Random plays of attention in another pool, and their decisions against the pinned ones."""

    def judge() -> str:
        from oracle.turns import play
        from oracle.walks import pinned

        for seed, digest in enumerate(pinned("plays")[:count]):
            one = play(seed)
            if one.fault or one.digest != digest:
                return one.fault or f"decisions of play {seed}"
        return ""

    return judge


def swarms(count: int) -> Judge:
    """Wide runs in virtual time, and their decisions against the pinned ones."""

    def judge() -> str:
        from oracle.swarm import WIDE, decisions, swarm
        from oracle.walks import pinned

        for i, digest in enumerate(pinned("swarms")[:count]):
            if decisions(swarm(WIDE + i)) != digest:
                return f"decisions of wide run {i}"
        return ""

    return judge


def schedules(runs: int, seeds: int) -> Judge:
    """Randomised schedules, and random runs in virtual time."""

    def judge() -> str:
        from oracle.checkers import check_log
        from oracle.pct import WORLDS, pct
        from oracle.swarm import swarm

        for world in WORLDS:
            tally = pct(world, runs)
            if tally.fault is not None:
                return f"{tally.fault[0]} in {world.name}"
        for seed in range(seeds):
            if check_log(swarm(seed)):
                return f"swarm({seed})"
        return ""

    return judge


def files(*names: str, only: str = "") -> Judge:
    """Files of property_tests, one after another. `only`: of these tests (a pytest expression)."""

    def judge() -> str:
        import pytest

        for file in names:
            seen = _First()
            flags = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", only]
            status = pytest.main([*flags, f"property_tests/{file}"], plugins=[seen])
            if seen.failed or status:
                return seen.failed or f"pytest ends {file} with {int(status)}"
        return ""

    return judge


class _First:
    """A pytest plugin: remembers the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A failed set-up counts, too."""
        if report.failed and not self.failed:
            self.failed = report.nodeid.removeprefix("property_tests/")


LONG = (
    "prompt_does or random_play or a_copy or explored or starves or never_idles or change_nothing "
    "or seeded_fault"
)
"""Tests of control that take a second or more, or change modules themselves."""
BY_HAND = (
    "test_control_edges.py", "test_control_corners.py", "test_control.py", "test_eviction.py",
    "test_prefetch.py",
)
GROUPS: dict[str, tuple[tuple[str, ...], tuple[Stage, ...]]] = {
    "control": (CONTROL, (
        Stage("tiny scopes", scopes(0, 700), 5),
        Stage("walks", walks(600), 8),
        Stage("wide runs", swarms(160), 12),
        Stage("quick tests", files(*BY_HAND, only=f"not ({LONG})"), 20),
        Stage("machines", files("test_machines.py", only="lists_say or books_say"), 40),
        Stage("small scopes", scopes(700, 6_000), 60),
        Stage("schedules", schedules(100, 60), 60),
        Stage("long tests", files("test_control.py", only=LONG), 120),
        Stage("larger scopes", scopes(6_000, 42_000), 400),
    )),
    "tiers": (TIERS, (Stage("tests", files("test_tiers.py"), 150),)),
    "lamina": (LAMINA, (
        Stage("plays", plays(1000), 10),
        Stage("tests", files("test_lamina_edges.py", "test_lamina_reference.py"), 40),
        Stage("simulator", files("test_lamina_simulator.py"), 100),
        Stage("serving", files("test_lamina_serving.py"), 200),
    )),
    "transfer": (TRANSFER, (
        Stage("transfer", files("test_transfer.py"), 60),
        Stage("tiers", files("test_tiers.py"), 150),
        Stage("machine", files("test_machines.py", only="engine"), 200),
        Stage("faults", files("test_engine_faults.py", "test_engine_memory.py"), 300),
    )),
    "engine": (ENGINE, (
        Stage("executors", files("test_executors.py"), 200),
        Stage("engine", files("test_engine.py", "test_engine_edges.py"), 300),
        Stage("faults", files("test_engine_faults.py", "test_engine_memory.py"), 300),
        Stage("callers", files("test_callers.py", "test_residency.py",
                               "test_prediction_engines.py"), 300),
    )),
}  # fmt: skip
"""Group -> modules, and who judges them."""


@dataclass(frozen=True)
class Unchanged:
    """What nobody may blame."""

    module: str

    @property
    def source(self) -> str:
        """As it is."""
        return file_of(self.module).read_text(encoding="utf-8")


def judge(change: Change | Unchanged, stages: Iterable[Stage]) -> tuple[str, str]:
    """(what kills the change, at which stage), in a process of its own; "" when nothing does."""
    stages = tuple(stages)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _child(change, stages, write)
    os.close(write)
    told = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        used, idle = 0.0, 0
        while idle < STILL:
            ready, _, _ = select.select([pipe], [], [], 5.0)
            if ready:
                piece = pipe.read(4096)
                if not piece:
                    break
                told += piece
            before, used = used, _cpu_seconds(child)
            idle = 0 if ready or used - before > 0.02 else idle + 1
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # its own child; one that hangs ends here
    os.waitpid(child, 0)
    lines = told.decode().split("\n")
    for stage, line in zip(stages, lines[:-1], strict=False):
        if line:
            return line, stage.name
    return ("", "") if len(lines) > len(stages) else ("hangs", stages[len(lines) - 1].name)


def _cpu_seconds(pid: int) -> float:
    """What the process has used so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(change: Change | Unchanged, stages: tuple[Stage, ...], write: int) -> None:
    """Writes a line a stage: what was found, or nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    os.chdir(ROOT)
    used = 0.0
    serve(change.module, change.source)
    for stage in stages:
        used += stage.seconds
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + time.process_time()), -1))
        try:
            verdict = stage.judge()
        except BaseException as error:
            verdict = f"raises {type(error).__name__}"
        os.write(write, (re.sub(r"\s+", " ", verdict)[:200] + "\n").encode())
        if verdict:
            break
    os._exit(0)


def explained(page: Path) -> dict[str, str]:
    """Names of changes that cannot be killed -> why, from the tables of a page of specs/."""
    rows = re.findall(
        r"^\| `(.+? \| .+? \| .+?)` \| (.+) \|$", page.read_text("utf-8"), re.MULTILINE
    )
    return dict(rows)


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Name -> the last verdict on it."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most", help="the last stage to ask")
    parser.add_argument("--again", action="store_true", help="judge again what lives in OUT")
    args = parser.parse_args()
    modules, stages = GROUPS[args.group]
    names = [s.name for s in stages]
    if args.most:
        stages = stages[: names.index(args.most) + 1]
    known = {name for name, record in results(args.out).items()
             if record["killed_by"] or not args.again}  # fmt: skip
    drawn = [c for c in sample(modules, args.seed)[: args.count] if c.name not in known]
    preload()
    whole = args.count is None
    for module in modules if whole else sorted({c.module for c in drawn[:1]}):
        if any(blamed := judge(Unchanged(module), stages)):
            parser.error(f"the unchanged {module} is blamed: {blamed}")

    def one(change: Change) -> None:
        began = time.monotonic()
        killer, stage = judge(change, stages)
        seconds = round(time.monotonic() - began, 2)
        record = {"name": change.name, "killed_by": killer, "stage": stage, "seconds": seconds}
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in pool.map(one, drawn):
            pass


def preload() -> None:
    """What every child would import: libraries of others alone, and none that pytest rewrites."""
    import jax
    import numpy
    import pytest

    assert all((jax, numpy, pytest))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "property_tests"))
    main()
