"""The model that benchmarks are made with, and what stands around other engines beside ours."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import COMPILED

from jax_impl.app.bench import random_requests
from jax_impl.app.routes import traits
from jax_impl.engine import JaxEngine
from oracle.tiny import tiny_config, write_checkpoint
from perf import limits, peers
from perf.bench_checkpoint import MIXTRAL, QWEN3, SHAPES, config_of, write_bench
from perf.gguf_file import BF16, write_gguf
from reference.files.checkpoint import Checkpoint
from reference.files.routing_trace import trace_of_records
from reference.vocab.errors import BadInput, Unsupported

SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32},
    "mixtral": {"intermediate_size": 64},
}  # fmt: skip
BOTH: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024,
}  # fmt: skip


def small(folder: Path, shape: str, seed: int = 0) -> Path:
    return write_bench(folder / f"{shape}{seed}", shape, 0.01, seed, **SMALL[shape], **BOTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


def loops(tokens: Sequence[int], longest: int = 8) -> bool:
    """The second half of the text repeats with a period of at most `longest`."""
    half = list(tokens)[len(tokens) // 2 :]
    return any(half[p:] == half[:-p] for p in range(1, min(longest, len(half) // 2) + 1))


def digest(model: Path) -> str:
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(model.iterdir()))).hexdigest()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_routes_like_real_models(folder: Path, shape: str) -> None:
    """Bands around what the stated shares give; published figures are in docs/bench.md."""
    model = small(folder, shape)
    assert digest(model) == digest(small(folder / "again", shape))
    assert digest(model) != digest(small(folder, shape, seed=1))
    with JaxEngine.open(model, memory="100%", keep_log=True, ignore_eos=True, chunk=16,
                        max_running=8, kv_tokens=512, compile_cache=COMPILED) as engine:
        asked = random_requests(engine.config.vocab, 8, 16, 24)
        texts = [handle.result().tokens for handle in engine.submit_all(asked)]
        records, c = engine.records, engine.config
    found = traits(trace_of_records(records, "m", c.experts, c.top_k, c.moe_layers, 1))
    lag, again = found["kept from the token so many before"], "experts of two requests in step " \
        "that are equal"
    requests, chance = found[again][""], found["chance"][""]
    quarter = found["the most used quarter takes"]
    if shape == "qwen3_moe":
        # From token to token more is kept than at far lags, there more than between requests,
        # there more than chance.
        assert 0.45 < lag["1"] < 0.68 and 0.35 < lag["8"] < 0.6
        assert lag["1"] > lag["8"] + 0.04 > requests + 0.12
        assert 0.17 < requests < 0.36 and chance == 0.125
        assert quarter["of all"] > 0.42 and quarter["of a request"] > 0.6
        assert 28 < found["distinct experts of a layer, requests in step"]["8"] < 42
    else:
        assert 0.25 < lag["1"] < 0.42 and 0.15 < requests < 0.4 and chance == 0.25
        assert 0.25 < quarter["of all"] < 0.4
    assert not any(map(loops, texts)) and len({t for text in texts for t in text}) > 60
    assert not any(t % 4 == 3 for text in texts for t in text), "a topical token was written"


def test_what_a_loop_is() -> None:
    assert loops([1, 2, 3, 4] + [7, 8] * 6) and not loops(range(20)) and loops([5] * 4)


def test_written_as_a_stream(tmp_path: Path) -> None:
    """40 MB of experts in layers of 12 MB: never more than a few pieces in memory."""
    tracemalloc.start()
    model = write_bench(tmp_path / "m", "qwen3_moe", 0.036, vocab_size=1024, hidden_size=512,
                        moe_intermediate_size=128, num_attention_heads=8, num_key_value_heads=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with Checkpoint.open(model) as ckpt:
        assert ckpt.experts_bytes > 36 << 20 and peak < ckpt.experts_bytes


def test_sizes_and_refusals() -> None:
    for shape, shares in (("qwen3_moe", QWEN3), ("mixtral", MIXTRAL)):
        config, told = config_of(shape, 2.0)
        assert told is shares
        assert shares.all + shares.request + shares.recent + shares.token == pytest.approx(1.0)
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        experts = config.get("num_experts") or config["num_local_experts"]
        size = config["num_hidden_layers"] * experts * 3 * inner * config["hidden_size"] * 2
        assert abs(size / 2**30 - 2.0) < 0.15
    with pytest.raises(BadInput, match="supported: qwen3_moe, mixtral"):
        config_of("llama", 1.0)


def parse(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, bytes]]]:
    """Fields and tensors of a GGUF file, by the format's own words."""
    data, at = path.read_bytes(), 24
    magic, version, tensors, fields = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)

    def take(form: str) -> Any:
        nonlocal at
        [value] = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text() -> str:
        nonlocal at
        n = take("Q")
        at += n
        return data[at - n : at].decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = take("I"), take("Q")
            return [value(inner) for _ in range(n)]
        return take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    told = {}
    for _ in range(fields):
        name = text()
        told[name] = value(take("I"))
    infos = []
    for _ in range(tensors):
        name, dims = text(), take("I")
        shape = tuple(reversed([take("Q") for _ in range(dims)]))
        infos.append((name, shape, take("I"), take("Q")))
    start = -(-at // 32) * 32
    found = {}
    for name, shape, kind, offset in infos:
        size = int(np.prod(shape)) * (2 if kind == BF16 else 4)
        assert offset % 32 == 0
        found[name] = (shape, kind, data[start + offset : start + offset + size])
    return told, found


@pytest.mark.parametrize("shape", list(SHAPES))
def test_converted_weights_are_the_weights(folder: Path, tmp_path: Path, shape: str) -> None:
    model = small(folder / "gguf", shape)
    told, found = parse(write_gguf(model, tmp_path / "m.gguf"))
    arch = "qwen3moe" if shape == "qwen3_moe" else "llama"
    assert told["general.architecture"] == arch and told[f"{arch}.block_count"] == 3
    assert len(told["tokenizer.ggml.tokens"]) == 1024 == len(set(told["tokenizer.ggml.tokens"]))
    assert told[f"{arch}.rope.freq_base"] == 1e6 and told[f"{arch}.attention.key_length"] == 64
    with Checkpoint.open(model) as ckpt:
        c = ckpt.config
        assert told[f"{arch}.expert_count"] == c.experts
        assert told[f"{arch}.expert_used_count"] == c.top_k
        stacked = found["blk.1.ffn_down_exps.weight"]
        n = ckpt.expert_roles.index("down")
        parts = [ckpt.read(ckpt.expert(1, e)[n]).tobytes() for e in range(c.experts)]
        assert stacked[2] == b"".join(parts) and stacked[0][0] == c.experts
        router = np.frombuffer(found["blk.2.ffn_gate_inp.weight"][2], np.uint32)
        assert (router >> 16 == ckpt.read(ckpt.tensor("layers.2.router")).ravel()).all()
        q = np.frombuffer(found["blk.0.attn_q.weight"][2], np.uint16).reshape(512, 256)
        own = ckpt.read(ckpt.tensor("layers.0.q"))
        if shape == "qwen3_moe":
            assert (q == own).all()
        else:  # entries 2i, 2i+1 of a head are i and i + 32 of ours
            assert (q[64:128:2] == own[64:96]).all() and (q[65:128:2] == own[96:128]).all()
        names = 3 + 3 * (len(ckpt.roles) - 3) // 3 + 3 * 3
        assert len(found) == names
    other = write_checkpoint(tmp_path / "o", tiny_config("olmoe"))
    with pytest.raises(Unsupported, match="family olmoe"):
        write_gguf(other, tmp_path / "o.gguf")


def test_a_group_bounds_what_its_processes_hold(tmp_path: Path) -> None:
    if limits.controller() is None:
        pytest.skip("no memory controller can be written here")
    hold = "import sys; x = bytearray(int(sys.argv[1]) << 20); print(len(x))"
    ran = []
    for mib in (24, 400):
        group = limits.Group(f"covey-test-{mib}-{tmp_path.name}", 128 << 20)
        try:
            ran.append(subprocess.run(group.inside([sys.executable, "-c", hold, str(mib)]),
                                      text=True, capture_output=True))
            assert group.told()["peak"] > 24 << 20
        finally:
            group.close()
    assert ran[0].stdout == f"{24 << 20}\n" and ran[0].returncode == 0
    assert ran[1].returncode != 0 and not ran[1].stdout
    assert not group.path.exists()


def test_read_ahead_is_put_back(tmp_path: Path) -> None:
    knob = tmp_path / "queue" / "read_ahead_kb"
    knob.parent.mkdir()
    knob.write_text("8192\n")
    said: list[str] = []
    with limits.read_ahead(tmp_path, 128, said.append) as told:
        assert knob.read_text() == "128" and told == {"was_kib": 8192, "is_kib": 128}
    assert knob.read_text() == "8192" and not said
    with limits.read_ahead(None, 128, said.append) as told:
        assert told["is_kib"] is None
    assert said == ["the disk's read-ahead cannot be found"]


def test_agreement_of_texts() -> None:
    assert peers.words(" w300. w12.\ufffd w301.+w") == ["w300", "w301"]
    assert peers.agreement([" w300. w301. w302. w303."], [" w300. w301. w309. w303."]) == 0.5
    assert peers.agreement([" w300."], [" w300. w301."]) == 1.0
    assert peers.agreement([""], [""]) == 1.0


def test_our_own_child_in_a_comparison(folder: Path, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole comparison with the engines that are there: at least ours, and llama.cpp where
    its package is installed."""
    model, out = small(folder / "run", "qwen3_moe"), tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [
        "peers", str(model), "--json", str(out), "--requests", "2", "--rounds", "1",
        "--prompt-tokens", "6", "--new-tokens", "8", "--work", str(tmp_path / "work"),
        "--only", "covey,llama.cpp", "--read-ahead-kib", str(_ahead(model))])
    peers.main()
    told = json.loads(out.read_text())
    [row] = told["rows"]
    ours = row["engines"]["covey interleaved"]
    assert ours["tokens_per_s"] > 0 and 0 < ours["of_bound"] <= 1.0001
    assert ours["disk_bytes_per_token"] > 0 or told["engines"]["covey interleaved"]["system"] \
        != "direct"
    assert all(f["agreement"] > 0.5 for f in row["engines"].values())
    if "llama.cpp" not in row["engines"]:
        assert any("no package xllamacpp" in note for note in told["notes"])
    if limits.controller() is not None:
        limit = told["limits"]["covey interleaved"]
        assert limit == told["other_bytes"] + told["budget_bytes"] + (640 << 20)
        assert 0 < told["held"]["covey interleaved"]["peak"] <= limit
    assert f"{row['requests']} requests" in capsys.readouterr().out


def _ahead(path: Path) -> int:
    """The read-ahead that the disk has: a test changes no setting of the machine."""
    device = limits.device_of(path)
    return int((device / "queue" / "read_ahead_kb").read_text()) if device else 128


def test_the_speed_measurements_run() -> None:
    """One round of each kind, which measures nothing; perf/benchmarks/test_speed.py says how."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "perf/benchmarks",
         "-k", "balanced or 50 or direct"],
        cwd=Path(limits.__file__).parent.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "4 passed" in ran.stdout or "3 passed, 1 skipped" in ran.stdout
