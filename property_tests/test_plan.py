"""covey plan: the sizes are those of a run, the band is what its assumptions give."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import COMPILED
from hypothesis import given
from hypothesis import strategies as st

from jax_impl import transfer
from jax_impl.app import estimate
from jax_impl.app.main import main
from jax_impl.app.plan import speed
from jax_impl.engine import JaxEngine
from oracle.family_variants import FAMILY_VARIANTS
from oracle.tiny import tiny_config, write_checkpoint
from oracle.variants import VARIANTS, Variant
from reference.files.bare import BareModel, is_bare
from reference.files.budget import parse_size
from reference.files.checkpoint import Checkpoint
from reference.files.config_json import model_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=4)
    return write_checkpoint(tmp_path_factory.mktemp("plan") / "model", config, dtype="BF16")


def planned(model: Path, out: Path, *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", str(model), "--json", str(out), *words]) == status
    return json.loads(out.read_text())


def test_a_speed_has_no_exponent() -> None:
    assert list(map(speed, (1265.4, 99.5, 12.34, 0.0123, 0.000012))) == [
        "1265", "99.5", "12.3", "0.0123", "0.000012"]  # fmt: skip


@pytest.mark.rule("PLAN-1")
@pytest.mark.parametrize("memory", ["20%", "55%", "100%", "70KiB"])
def test_the_sizes_are_those_of_a_run(model: Path, tmp_path: Path, memory: str) -> None:
    words = ("--memory", memory, "--max-running", "4", "--kv-tokens", "700", "--no-probe")
    d = planned(model, tmp_path / "out", *words)
    with JaxEngine.open(model, memory=memory, max_running=4, kv_tokens=700,
                        compile_cache=COMPILED) as engine:
        assert d["slots"] == engine.sizes.slots == engine.control.slots
        assert (d["budget_bytes"], d["slot_bytes"]) == (engine.sizes.budget, engine.sizes.slot)
        assert d["kv_tokens"] == engine.control.kv_tokens
        assert d["held"]["kv"] == engine.sizes.kv
        tables = 512 * 8 * 4  # of the rotary embedding, beside the weights
        assert d["held"]["weights"] + tables == engine.sizes.resident
        assert d["held"]["experts"] == engine.sizes.slots * engine.sizes.slot
    assert d["share"] == d["slots"] / 48 and d["expert_bytes"] == 3 * 16 * 32 * 2
    assert d["kv_bytes_a_token"] == 3 * 2 * 2 * 8 * 4


@pytest.mark.rule("PLAN-1", "TIER-1")
def test_a_host_tier(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--memory", "20%", "--no-probe", "--host-memory")
    d = planned(model, tmp_path / "out", *words, "50%")
    assert (d["host_bytes"], d["host_slots"]) == (24 * 3072, 24) and d["slots"] == 9
    assert d["held"]["host"] == 24 * 3072
    assert d["held"]["total"] == sum(n for part, n in d["held"].items() if part != "total")
    assert "72 KiB: 24 experts between disk and device" in capsys.readouterr().out
    assert planned(model, tmp_path / "out", *words, "1B", status=2)["refused"]
    assert "host memory budget 1 B holds no expert" in capsys.readouterr().err


@pytest.mark.rule("PLAN-1")
def test_a_budget_that_a_run_refuses(model: Path, tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    d = planned(model, tmp_path / "out", "--memory", "9KiB", status=2)
    told = capsys.readouterr()
    assert d["refused"] and "at least 12KiB" in told.err and "Traceback" not in told.err
    least = d["least_budget_bytes"]
    assert f"smallest budget   {least // 1024}KiB: 4 slots" in told.out and "band" not in d
    assert parse_size(f"{least // 1024}KiB") == least
    assert planned(model, tmp_path / "out", "--memory", f"{least}B", "--no-probe")["slots"] == 4
    assert main(["plan", str(model), "--memory", f"{least - 1}B", "--no-probe"]) == 2


@pytest.mark.rule("PLAN-2")
def test_headers_only(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                      capsys: pytest.CaptureFixture[str]) -> None:
    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    for name in ("read", "read_into", "open_fd"):
        monkeypatch.setattr(Checkpoint, name, read)
    monkeypatch.setattr(transfer, "Transfers", read)
    d = planned(model, tmp_path / "out", "--memory", "50%", "--no-probe")
    assert "band" not in d and "expected" not in capsys.readouterr().out
    with pytest.raises(AssertionError, match="weights were read"):
        main(["plan", str(model), "--memory", "50%"])


@pytest.mark.rule("PLAN-3")
def test_the_probe(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "PROBE_S", 0.02)
    monkeypatch.setattr(estimate.read_rate, "__defaults__", (0.02,))
    monkeypatch.setattr(estimate.expert_seconds, "__defaults__", (0.02,))
    b = planned(model, tmp_path / "out", "--memory", "50%", "--requests", "4")["band"]
    assert b["disk"] > 1e5 and 1e-7 < b["expert_s"] < 1 and b["how"] in ("direct", "buffered")
    low, high = b["tokens_per_s"]
    assert 0 < low <= high and b["limit"] in ("reading", "computing")
    ckpt = Checkpoint.open(model)
    dense = sum(ckpt.tensor(role).nbytes for role in ckpt.roles if role != "embed")
    speeds = estimate.Speeds(b["disk"], b["expert_s"])
    band = estimate.band(ckpt.config, ckpt.expert_bytes(), dense, 0.5, speeds, 4)
    assert (band.low, band.high) == pytest.approx((low, high))
    assert f"{speed(low)} to {speed(high)} tokens/s over 4 requests" in capsys.readouterr().out
    ckpt.close()


CONFIG = model_config(
    tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=4, num_hidden_layers=2), "c")


@pytest.mark.rule("PLAN-3")
def test_the_band_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "VISIT_S", 0.0)
    # Alone: 2 layers x 4 experts x 1 ms and 1000 bytes of others at 1 MB/s; half of 8 reads of
    # 1000 bytes at 0.5 MB/s.
    one = estimate.band(CONFIG, 1000, 1000, 0.5, estimate.Speeds(0.5e6, 1e-3), 1)
    assert one.compute_s[0] == pytest.approx(9e-3) and one.fetch_s[0] == pytest.approx(8e-3)
    assert one.low == pytest.approx(1 / 17e-3)
    assert one.fetch_s[1] == pytest.approx(16e-3 * 0.5**1.25)
    assert one.high == pytest.approx(1 / 9e-3) and one.limit == "computing"
    # Two of them name 16 x (1 - (3/4)^2) = 7 experts a layer, 3.5 each.
    two = estimate.band(CONFIG, 1000, 1000, 0.5, estimate.Speeds(0.5e6, 1e-3), 2)
    assert two.compute_s[1] == pytest.approx(7e-3 + 0.5e-3) and two.low == one.low
    with pytest.raises(ValueError, match="both speeds"):
        estimate.band(CONFIG, 1000, 1000, 0.5, estimate.Speeds(None, 1e-3), 2)
    assert estimate.band(CONFIG, 1000, 1000, 1.0, estimate.Speeds(None, 1e-3), 2).fetch_s == (0, 0)


@pytest.mark.rule("PLAN-3")
@given(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(1e6, 1e10), st.floats(1e-6, 1e-1),
       st.integers(1, 64), st.floats(1, 10))
def test_more_of_anything_never_hurts(
    share: float, less: float, disk: float, expert_s: float, requests: int, factor: float
) -> None:
    def band(s: float, d: float, e: float) -> estimate.Band:
        return estimate.band(CONFIG, 5000, 9000, s, estimate.Speeds(d, e), requests)

    here = band(share, disk, expert_s)
    assert here.low <= here.high * (1 + 1e-9)
    for worse in (band(share * less, disk, expert_s), band(share, disk / factor, expert_s),
                  band(share, disk, expert_s * factor)):
        assert worse.low <= here.low * (1 + 1e-9) and worse.high <= here.high * (1 + 1e-9)


@pytest.mark.rule("PLAN-4")
@pytest.mark.parametrize(
    "variant", [*VARIANTS, *(v for v in FAMILY_VARIANTS if "mixed-types" not in v.name)],
    ids=lambda v: v.name)
def test_sizes_without_weights(variant: Variant, tmp_path: Path) -> None:
    stored = {k: v for k, v in variant.stored.items()
              if k not in ("wide", "unpacked", "scale_dtype")}  # what config.json does not say
    full = replace(variant, stored=stored).write(tmp_path / "full")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(full / "config.json", bare)
    assert is_bare(bare) and not is_bare(full)
    a, b = Checkpoint.open(full), BareModel.open(bare)
    assert (a.non_expert_bytes, a.experts_bytes, a.expert_bytes()) == (
        b.non_expert_bytes, b.experts_bytes, b.expert_bytes())
    assert sorted(a.roles) == sorted(b.roles)
    for role in a.roles:
        assert (a.tensor(role).shape, a.tensor(role).nbytes) == (
            b.tensor(role).shape, b.tensor(role).nbytes), role
    a.close()


@pytest.mark.rule("PLAN-4")
def test_a_plan_without_weights(model: Path, tmp_path: Path,
                                capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    words = ("--memory", "50%", "--no-probe")
    a, b = planned(model, tmp_path / "a", *words), planned(bare, tmp_path / "b", *words)
    assert {k: v for k, v in a.items() if k not in ("model", "notes", "available_bytes")} == {
        k: v for k, v in b.items() if k not in ("model", "notes", "available_bytes")}
    assert "sizes follow from config.json at BF16" in " ".join(b["notes"]) and not a["notes"]
    raw = json.loads((bare / "config.json").read_text())
    del raw["dtype"]
    (bare / "config.json").write_text(json.dumps(raw))
    assert "which it does not name" in planned(bare, tmp_path / "c", *words)["notes"][0]
    capsys.readouterr()
    d = planned(bare, tmp_path / "d", "--memory", "50%")
    assert d["band"]["tokens_per_s"] is None
    assert "unknown: --disk SIZE states" in capsys.readouterr().out
    assert planned(bare, tmp_path / "d", "--disk", "1GB")["band"]["tokens_per_s"][0] > 0


def test_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_checkpoint(tmp_path / "dense", tiny_config("llama"))
    d = planned(dense, tmp_path / "out", "--memory", "1B")
    out = capsys.readouterr().out
    assert "any budget will do" in out and d["slots"] == 0
    assert d["band"]["tokens_per_s"][0] > 0 and d["band"]["limit"] == "computing"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["{model}", "--memory", "lots"], "size 'lots'"),
        (["{model}", "--disk", "0B"], "--disk: 0 bytes a second"),
        (["{model}", "--requests", "0"], "at least 1 expected"),
        (["{model}", "--kv-tokens", "3"], "kv_tokens: 3; at least one block of 64"),
        (["{parent}"], "no config.json in it"),
    ],
)
def test_bad_input(model: Path, words: list[str], said: str,
                   capsys: pytest.CaptureFixture[str]) -> None:
    words = [w.format(model=model, parent=model.parent) for w in words]
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_dense_model_is_estimated_by_its_feed_forward(tmp_path: Path) -> None:
    """The probe runs the first layer's feed-forward; its bytes, not an expert's, are the scale."""
    path = write_checkpoint(tmp_path / "dense", tiny_config("llama"))
    out = tmp_path / "plan.json"
    assert main(["plan", str(path), "--memory", "50%", "--json", str(out)]) == 0
    low, high = json.loads(out.read_text())["band"]["tokens_per_s"]
    assert high >= low > 50
