"""Covey beside llama.cpp and transformers: one model, one memory limit, rounds in turn.

    python -m perf.peers MODEL --json OUT [--memory 50%] [--requests 1,4,8,16]
        [--llama-python PATH] [--torch-python PATH] [--only covey,llama.cpp]

Each engine is a process in a control group of its own (version 2, or 1) whose limit counts its
anonymous memory and the page cache that it brings in. The limit is the other weights, the share
--memory of the experts, and --runtime for everything else; with --each-runtime every engine gets
instead what it holds of its own once it is open, so that all have the same bytes for experts.
llama.cpp (package xllamacpp) maps a converted copy of the same weights and has as many slots as
requests; transformers (with accelerate) keeps on disk what does not fit. All take the same token
ids, greedily, and their texts are compared: rounding differs, so they agree up to some token.
The disk's read-ahead is set to --read-ahead-kib (and put back): with 8 MiB, as some machines have
it, mapped experts are read several times over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from jax_impl.app import bench, builtin
from jax_impl.app.machine import drop_pages, setting
from jax_impl.app.picture import colour
from perf.gguf_file import write_gguf
from perf.limits import Group, controller, device_of, disk_ticks, read_ahead, read_bytes
from reference.files.budget import parse_size, show_size
from reference.files.checkpoint import Checkpoint
from reference.vocab.errors import BadInput

HERE = Path(__file__).parent


class Peer:
    """An engine in a process of its own."""

    def __init__(self, name: str, command: Sequence[str], group: Group | None, cwd: Path) -> None:
        self.name, self.group = name, group
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.child = subprocess.Popen(
            group.inside(command) if group else command, text=True, cwd=cwd,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        try:
            self.head = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, prompts: list[tuple[int, ...]], new: int) -> dict[str, Any]:
        """One job and its answer, with the bytes that the process read from the disk."""
        assert self.child.stdin is not None
        before = read_bytes(self.child.pid)
        self.child.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self.child.stdin.flush()
        found = self._answer()
        if found["errors"]:
            raise SystemExit(f"{self.name}: {found['errors'][0]}")
        return found | {"disk_bytes": read_bytes(self.child.pid) - before}

    def _answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith("{"):
                return json.loads(line)
        status = self.child.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
        told = f"; its group: {self.group.told()}" if self.group else ""
        raise SystemExit(f"{self.name}: ended with status {status}: {''.join(last)}{told}")

    def close(self) -> None:
        """Ends the process and its group."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.close()
            self.child.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.child.kill()
            self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()
        self.errors.close()
        if self.group:
            self.group.close()


def has(python: str, package: str) -> bool:
    """An interpreter that can import a package."""
    ask = f"import importlib.util as u; raise SystemExit(not u.find_spec('{package}'))"
    run = [python, "-c", ask]
    try:
        return subprocess.run(run, capture_output=True).returncode == 0
    except OSError:
        return False


def words(text: str) -> list[str]:
    """The whole words of a text: tokens that stand for bytes are left out."""
    found = [w for w in text.replace("\ufffd", " ").split() if w.startswith("w") and "." in w]
    return [w for w in (w.split(".")[0] for w in found) if w[1:].isdigit() and int(w[1:]) > 258]


def agreement(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Mean share of the words of a text up to the first that differs."""
    shares = []
    for a, b in zip(map(words, ours), map(words, theirs), strict=True):
        most = min(len(a), len(b))
        same = next((i for i in range(most) if a[i] != b[i]), most)
        shares.append(same / most if most else 1.0)
    return sum(shares) / len(shares)


class Comparison:
    """One run of everything."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.work, self.stack = args, work, stack
        with Checkpoint.open(args.model) as ckpt:
            self.vocab = ckpt.config.vocab
            self.other, self.experts = ckpt.non_expert_bytes, ckpt.experts_bytes
        self.budget = parse_size(args.memory, self.experts)
        self.each = -(-(args.prompt_tokens + args.new_tokens) // 64) * 64
        self.slots = max(args.requests)
        self.limits: dict[str, int | None] = {}
        self.notes: list[str] = []
        self.limited = controller() is not None and not args.no_limit
        if not self.limited:
            self.say("no memory limit: " + ("asked for" if args.no_limit else
                     "no memory controller can be written here") + "; pages are dropped before "
                     "every run instead, which does not bound what an engine maps")

    def say(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def commands(self) -> Iterator[tuple[str, list[str], Path]]:
        """(name, command, folder whose pages are its) of every engine that is there."""
        a, model = self.args, self.args.model.resolve()
        cores = str(os.cpu_count() or 1)
        for scheduler in a.schedulers.split(","):
            told = {**bench.contender(scheduler).options, "compute": a.compute, "io": a.io}
            yield f"covey {scheduler}", [
                sys.executable, "-m", "perf.peer_covey", str(model), str(self.budget),
                str(self.slots), str(self.each), json.dumps(told)], model
        if has(a.llama_python, "xllamacpp"):
            gguf = self.work / "model.gguf"
            if not gguf.exists():
                print(f"writing {gguf}", flush=True)
                write_gguf(model, gguf)
            yield "llama.cpp", [a.llama_python, str(HERE / "peer_llama.py"), str(gguf),
                                str(self.slots), str(self.each), cores], self.work
        else:
            self.say(f"llama.cpp: no package xllamacpp for {a.llama_python}")
        if has(a.torch_python, "torch") and has(a.torch_python, "accelerate"):
            fits = str(self.other + self.budget) if self.budget < self.experts else "-1"
            yield "transformers", [
                a.torch_python, str(HERE / "peer_transformers.py"), str(model), fits,
                str(self.work / "offload"), cores], self.work / "offload"
        else:
            self.say(f"transformers: no torch and accelerate for {a.torch_python}")

    def open(self, name: str, command: list[str], folder: Path) -> Peer:
        """Starts an engine, in its group. With --each-runtime it is started without a limit
        first, to see what it holds of its own."""
        for place in (folder, self.args.model):
            if place.is_dir():
                drop_pages(place)
        if not self.limited:
            return Peer(name, command, None, HERE.parent)
        runtime = parse_size(self.args.runtime, None)
        label = "covey-" + "".join(c if c.isalnum() else "-" for c in name) + f"-{os.getpid()}"
        if self.args.each_runtime:
            probe = Peer(name, command, Group(label, 1 << 40), HERE.parent)
            assert probe.group is not None
            probe.ask(self.prompts(self.slots, 99), 4)
            runtime = probe.group.told()["anonymous"] + (64 << 20)
            if name.startswith("covey"):
                runtime -= self.other + self.budget
            probe.close()
            if folder.is_dir():
                drop_pages(folder)
        self.limits[name] = limit = self.other + self.budget + runtime
        print(f"{name}: limit {show_size(limit)}", flush=True)
        peer = Peer(name, command, Group(label, limit), HERE.parent)
        return peer

    def prompts(self, crowd: int, turn: int) -> list[tuple[int, ...]]:
        requests = bench.random_requests(self.vocab, crowd, self.args.prompt_tokens,
                                         self.args.new_tokens, turn)
        return [r.prompt for r in requests]  # type: ignore[misc]

    def measure(self) -> dict[str, Any]:
        """All rounds; what --json holds."""
        peers = []
        for name, command, folder in self.commands():
            if not any(name.startswith(word) for word in self.args.only.split(",")):
                continue
            peer = self.open(name, command, folder)
            self.stack.callback(peer.close)
            peers.append((peer, folder))
        device = device_of(self.args.model)
        for peer, _ in peers:
            peer.ask(self.prompts(self.slots, 98), min(8, self.args.new_tokens))
        rows = []
        order = random.Random(0)
        for crowd in self.args.requests:
            found: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer, _ in peers}
            for turn in range(self.args.rounds):
                order.shuffle(peers)
                for peer, folder in peers:
                    if not self.limited and folder.is_dir():
                        drop_pages(folder)
                    busy = disk_ticks(device)[0]
                    one = peer.ask(self.prompts(crowd, turn), self.args.new_tokens)
                    one["disk_busy_s"] = disk_ticks(device)[0] - busy
                    one["load"] = os.getloadavg()[0]
                    found[peer.name].append(one)
            rows.append(self.row(crowd, found))
        held = {peer.name: peer.group.told() for peer, _ in peers if peer.group}
        return {
            "model": builtin.name_of(self.args.model), "other_bytes": self.other,
            "experts_bytes": self.experts, "budget_bytes": self.budget, "memory": self.args.memory,
            "limits": self.limits, "each_runtime": self.args.each_runtime, "held": held,
            "engines": {peer.name: peer.head for peer, _ in peers}, "notes": self.notes,
            "prompt_tokens": self.args.prompt_tokens, "new_tokens": self.args.new_tokens,
            "rows": rows,
        }

    def row(self, crowd: int, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Figures of all engines with one number of requests, and the table's lines."""
        new = self.args.new_tokens
        row: dict[str, Any] = {"requests": crowd, "engines": {}}
        first = next(iter(sorted(found)))
        for name, runs in sorted(found.items()):
            rates = [crowd * new / r["seconds"] for r in runs]
            tokens = crowd * new * len(runs)
            seconds = sum(r["seconds"] for r in runs)
            f: dict[str, Any] = {
                "tokens_per_s": median(rates), "rounds_tokens_per_s": rates,
                "disk_bytes_per_token": sum(r["disk_bytes"] for r in runs) / tokens,
                "disk_busy": sum(r["disk_busy_s"] for r in runs) / seconds,
                "ttft_s": median([t[0] for r in runs for t in r["token_s"] if t] or [0.0]) or None,
                "agreement": median(agreement(a["texts"], b["texts"])
                                    for a, b in zip(found[first], runs, strict=True)),
                "load": [r["load"] for r in runs],
            }  # fmt: skip
            if "sums" in runs[0]:
                wall, compute, channel = (sum(r["sums"][k] for r in runs)
                                          for k in ("wall_s", "compute_s", "channel_s"))
                f |= {"compute_busy": compute / wall, "channel_busy": channel / wall,
                      "of_bound": max(compute, channel) / wall}
            row["engines"][name] = f
        ours = {n: f for n, f in row["engines"].items() if n.startswith("covey")}
        if ours:
            best = max(ours.values(), key=lambda f: f["tokens_per_s"])
            row["covey_over"] = {
                n: median(a / b for a, b in zip(best["rounds_tokens_per_s"],
                                                f["rounds_tokens_per_s"], strict=True))
                for n, f in row["engines"].items() if n not in ours}  # fmt: skip
        print(f"\n{crowd} requests\n{'':24}{'tok/s':>8}{'(rounds)':>16}{'MB/tok':>8}"
              f"{'disk busy':>11}{'bound':>7}{'same text':>11}{'load':>6}")
        for name, f in row["engines"].items():
            rates = f["rounds_tokens_per_s"]
            bound = f"{f['of_bound']:.0%}" if "of_bound" in f else ""
            print(f"{name:24}{f['tokens_per_s']:>8.1f}"
                  f"{f'({min(rates):.1f}-{max(rates):.1f})':>16}"
                  f"{f['disk_bytes_per_token'] / 1e6:>8.1f}{f['disk_busy']:>11.0%}{bound:>7}"
                  f"{f['agreement']:>11.0%}{max(f['load']):>6.1f}")
        for name, gain in row.get("covey_over", {}).items():
            print(f"covey over {name}: {gain:.2f} times", flush=True)
        return row


def draw(document: dict[str, Any], out: Path) -> None:
    """Tokens a second of every engine over requests at a time, as a PNG (needs matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), dpi=110, layout="constrained")
    axis = figure.subplots()
    crowds = [row["requests"] for row in document["rows"]]
    for n, name in enumerate(document["rows"][0]["engines"]):
        points = [row["engines"][name] for row in document["rows"]]
        axis.plot(crowds, [f["tokens_per_s"] for f in points], "o-", color=colour(n), label=name,
                  markersize=4)
        axis.fill_between(crowds, [min(f["rounds_tokens_per_s"]) for f in points],
                          [max(f["rounds_tokens_per_s"]) for f in points], color=colour(n),
                          alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(crowds, [str(c) for c in crowds])
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.set_xlabel("requests at a time", fontsize=9)
    axis.set_ylabel("tokens/s", fontsize=9)
    axis.set_title(f"{document['memory']} of the experts in memory; "
                   f"{document['machine']['processor']}, {document['machine']['cores']} cores",
                   fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(out)


def arguments() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=builtin.model)
    parser.add_argument("--json", metavar="OUT", type=Path, required=True)
    parser.add_argument("--png", metavar="OUT", type=Path, help="draw the table (matplotlib)")
    parser.add_argument("--memory", default="50%", help="share of the experts, or bytes for them")
    parser.add_argument("--requests", type=bench.counts, default=(1, 4, 8, 16))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=bench.PROMPT)
    parser.add_argument("--new-tokens", type=int, default=bench.NEW)
    parser.add_argument("--schedulers", default="interleaved", help="as in covey bench")
    parser.add_argument("--compute", default="bf16")
    parser.add_argument("--io", default="auto")
    parser.add_argument("--runtime", default="640MiB", help="beside weights and experts")
    parser.add_argument("--each-runtime", action="store_true")
    parser.add_argument("--no-limit", action="store_true")
    parser.add_argument("--read-ahead-kib", type=int, default=128)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--only", default="covey,llama.cpp,transformers")
    parser.add_argument("--work", type=Path, help="folder for the converted model (kept)")
    return parser


def main() -> None:
    """The command line."""
    parser = arguments()
    args = parser.parse_args()
    began = time.monotonic()
    document: dict[str, Any] = {
        **setting(), "command": " ".join(["python -m perf.peers", *sys.argv[1:]])}
    with ExitStack() as stack:
        work = args.work or Path(tempfile.mkdtemp(prefix="covey-peers-"))
        work.mkdir(parents=True, exist_ok=True)
        if not args.work:
            stack.callback(shutil.rmtree, work, ignore_errors=True)
        try:
            comparison = Comparison(args, work, stack)
            ahead = stack.enter_context(
                read_ahead(device_of(args.model), args.read_ahead_kib, comparison.say))
            document["read_ahead"] = ahead
            document |= comparison.measure()
        except BadInput as error:
            parser.error(str(error))
    document |= {"load_after": os.getloadavg()[0], "seconds": time.monotonic() - began}
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.png:
        draw(document, args.png)
    print(args.json)


if __name__ == "__main__":
    main()
