"""covey pack: the same model, laid out so that direct reads need no copy; whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import SMALL
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from jax_impl.app import pack
from jax_impl.app.main import main
from jax_impl.engine import JaxEngine
from jax_impl.fault_readers import FaultyReader
from jax_impl.readers import FileReader, Reader
from jax_impl.slots import SlotPool, layout
from jax_impl.spans import plan
from jax_impl.transfer import Transferred, Transfers
from oracle.family_variants import FAMILY_VARIANTS
from oracle.tiny import tiny_config, write_checkpoint
from oracle.variants import VARIANTS, Variant
from reference.files import aligned
from reference.files.budget import ALIGN, PAGE, slot_size
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.files.residency import fingerprint
from reference.files.safetensors_header import TensorRef
from reference.files.shards import read_shards
from reference.numerics.naive import naive_logits
from reference.vocab.ids import ExpertKey

ODD = {"moe_intermediate_size": 13, "hidden_size": 20, "num_attention_heads": 2, "head_dim": 6}
"""Sizes that no boundary divides."""
OTHERS = ("llama", "mistral", "qwen3", "gpt_oss", "granitemoe")
"""Dense, or stacked for every reader."""
MIXTURES = [v for v in (*VARIANTS, *FAMILY_VARIANTS[::3]) if v.family not in OTHERS]
EXTRA = [
    Variant("odd", "qwen3_moe", ODD), Variant("odd-bf16", "qwen3_moe", ODD, {"dtype": "BF16"}),
    Variant("odd-fused", "qwen3_moe", ODD, {"experts": "fused"}),
    Variant("odd-sharded", "qwen3_moe", {**ODD, "tie_word_embeddings": True},
            {"shards": 3, "tied_copy": True}),
]  # fmt: skip


def packed(model: Path, out: Path, *words: str) -> Path:
    assert main(["pack", str(model), str(out), "--quiet", *words]) == 0
    return out


@pytest.mark.rule("PACK-1", "MODEL-12")
@pytest.mark.parametrize("variant", [*MIXTURES, *EXTRA], ids=lambda v: v.name)
def test_the_same_tensors_on_boundaries(variant: Variant, tmp_path: Path) -> None:
    model = variant.write(tmp_path / "model")
    shard = 20_000 if len(variant.name) % 2 else 1 << 30
    out = packed(model, tmp_path / "out", "--shard", f"{shard}B")
    with Checkpoint.open(model) as a, Checkpoint.open(out) as b:
        for role in a.roles:
            assert np.array_equal(a.read(a.tensor(role)), b.read(b.tensor(role)))
        for layer in a.config.moe_layers:
            for e in range(a.config.experts):
                theirs, ours = a.expert(layer, e), b.expert(layer, e)
                start = ours[0].offset
                assert start % PAGE == 0 and len({r.file for r in ours}) == 1
                places = layout(ours)
                assert [r.offset - start for r in ours] == [p.offset for p in places]
                for x, y in zip(theirs, ours, strict=True):
                    assert (x.dtype, x.shape) == (y.dtype, y.shape)
                    assert np.array_equal(a.read(x), b.read(y))
        old, new = a.notes, b.notes
        assert old == new, "filler is no news"
        assert fingerprint(a) == fingerprint(b)
        heads, tensors = read_shards(out)
        assert len(heads) == len(b.files) and (len(heads) > 1) == (shard == 20_000)
    _, before = read_shards(model)
    stacked = variant.stored.get("experts") == "fused"
    kept = {name for name in tensors if not name.startswith("__pad_")}
    assert kept == before.keys() or stacked
    for head in heads:
        with safe_open(head.file, "numpy") as file:  # another reader, as strict as they come
            assert set(file.keys()) == head.tensors.keys()
        assert head.metadata == read_shards(model)[0][0].metadata


@pytest.mark.rule("PACK-1")
def test_no_filler_where_sizes_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("mixtral", hidden_size=64, intermediate_size=64)  # 3 x 16 KiB
    model = write_checkpoint(tmp_path / "model", config)
    (model / "tokenizer.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"not a pickle")
    (model / "sub").mkdir()
    (model / "away").symlink_to("/etc/passwd")
    packed(model, tmp_path / "out")
    said = capsys.readouterr().out
    assert "24 of 24 experts begin at a multiple of 4096" in said and "__pad_" not in said
    assert "not copied: away, sub" in said and "no whole pages" not in said
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors",
                                                    "tokenizer.json"]
    packed(tmp_path / "out", tmp_path / "again")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors").read_bytes(), "packing is idempotent"


class Watched(FileReader):
    """Notes the address, length and offset of every read."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int, int]] = []

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        for b in buffers:
            self.reads.append((np.frombuffer(b, np.uint8).ctypes.data, len(b), offset))
        return super().read(fd, buffers, offset)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(as it comes, packed): experts of a little more than a mebibyte, of no whole page."""
    folder = tmp_path_factory.mktemp("large")
    config = tiny_config("qwen3_moe", hidden_size=128, moe_intermediate_size=1401,
                         num_experts=4, num_hidden_layers=1, head_dim=8)
    model = write_checkpoint(folder / "model", config, dtype="BF16", pattern=True)
    return model, packed(model, folder / "packed")


def load_all(model: Path, reader: Reader, io: Any) -> tuple[Transfers, bool]:
    """Loads every expert once; the transfers, and whether all arrays had the file's bits."""
    with Checkpoint.open(model) as ckpt:
        keys = [ExpertKey(layer, e) for layer in ckpt.config.moe_layers
                for e in range(ckpt.config.experts)]
        pool = SlotPool(len(keys), slot_size(ckpt.expert(*key) for key in keys))
        done: list[Transferred] = []
        transfers = Transfers(pool, lambda key: ckpt.expert(*key), keys, done.append, threads=1,
                              io=io, reader=reader)
        for n, key in enumerate(keys):
            transfers.start(n, key, n)
        while transfers.idle < 1 or len(done) < len(keys):
            pass
        transfers.close()
        good = True
        for d in done:
            assert d.error is None, d.error
            wanted = [ckpt.read(r).tobytes() for r in ckpt.expert(*d.key)]
            good = good and [np.asarray(a).tobytes() for a in d.handle] == wanted
        return transfers, good


@pytest.mark.rule("XFER-11", "PACK-3", "XFER-3")
def test_direct_reads_go_straight_into_the_slots(large: tuple[Path, Path]) -> None:
    for model, straight in zip(large, (False, True), strict=True):
        reader = Watched()
        transfers, good = load_all(model, reader, "auto")
        assert good
        if transfers.io != "direct":
            pytest.skip("no direct reads on this file system")
        assert (transfers.bounce_bytes == 0) == straight
        pool = transfers._pool
        low = pool.view(0).ctypes.data
        high = low + pool.nbytes
        reads = reader.reads[1:]  # the first one asks whether direct reads work
        assert all(at % PAGE == n % PAGE == offset % PAGE == 0 for at, n, offset in reads)
        inside = [low <= at and at + n <= high for at, n, _ in reads]
        assert all(inside) if straight else not any(inside)
        assert len(reads) == 4 or not straight


@pytest.mark.rule("XFER-11", "XFER-4")
@pytest.mark.parametrize("fault", ["short", "eintr"])
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_short_reads_are_continued(large: tuple[Path, Path], fault: Any, io: Any) -> None:
    for model in large:
        reader = FaultyReader(fault, nth=2, every=2, times=6)
        try:
            assert load_all(model, reader, io)[1] and reader.fired >= 2
        except Exception as error:
            if "direct reads here" not in str(error):
                raise
            pytest.skip("no direct reads on this file system")


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 130)), min_size=1, max_size=6),
       st.integers(0, 3), st.integers(0, 2))
@pytest.mark.rule("XFER-11", "XFER-1")
def test_spans_bring_every_byte_to_its_place(
    parts: list[tuple[int, int]], lead: int, tail: int
) -> None:
    """Tensors with arbitrary holes between them: the spans, read as an image or piece by piece,
    put each byte where the layout says, and `straight` only where pages meet pages."""
    file, refs, at = Path("f"), [], lead * 2048
    for nbytes, gap in parts:
        refs.append(TensorRef(file, at, nbytes, "U8", (nbytes,)))
        at += nbytes + gap
    data = np.random.Generator(np.random.PCG64(1)).integers(0, 256, at + PAGE, np.uint8)
    places = layout(refs)
    size = slot_size([refs]) + tail * 2048
    slot = np.zeros(size + PAGE, np.uint8)
    for span in plan(refs, places):
        if (image := span.image) is not None:
            slot[image : image + span.nbytes] = data[span.offset : span.end]
        else:
            assert span.nbytes == sum(p.nbytes for p in span.pieces), "holes only in images"
            for p in span.pieces:
                slot[p.target : p.target + p.nbytes] = data[p.offset : p.offset + p.nbytes]
        if span.straight(size):
            assert image is not None and span.offset % PAGE == image % PAGE == 0
            assert image - -span.nbytes // PAGE * PAGE <= size
    for ref, place in zip(refs, places, strict=True):
        assert np.array_equal(slot[place.offset : place.offset + ref.nbytes],
                              data[ref.offset : ref.offset + ref.nbytes])
        assert place.offset % ALIGN == 0


@pytest.mark.rule("PACK-3")
def test_the_same_bits(large: tuple[Path, Path], tmp_path: Path) -> None:
    odd = EXTRA[2].write(tmp_path / "odd")
    assert np.array_equal(*(naive_logits(Checkpoint.open(m), [3, 1, 4], np.float32) for m in (
        odd, packed(odd, tmp_path / "out"))))
    results = []
    for model in large:
        with JaxEngine.open(model, **{**SMALL, "memory": "50%", "check": True}) as engine:
            results.append(engine.submit(Request("a", (5, 6, 7), 4), logits=True).result())
    assert results[0].tokens == results[1].tokens
    assert np.array_equal(results[0].logits, results[1].logits)


@pytest.mark.rule("PACK-2")
@pytest.mark.parametrize("how", ["write", "fallocate", "interrupt", "config", "rename"])
def test_whole_or_not_at_all(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_config("mixtral"), shards=2)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    count = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > 20 or how != "write":
            if how == "interrupt":
                raise KeyboardInterrupt
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args, **kwargs)

    write = os.write
    where = {"write": (os, "write"), "fallocate": (os, "posix_fallocate"),
             "interrupt": (aligned, "_write"), "config": (pack.shutil, "copyfile"),
             "rename": (os, "rename")}[how]
    monkeypatch.setattr(*where, fail)
    status = main(["pack", str(model), str(tmp_path / "out"), "--quiet"])
    monkeypatch.undo()
    assert count and status == (130 if how == "interrupt" else 1)
    assert os.listdir(tmp_path) == ["model"]
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before
    if how != "interrupt":
        assert f"out: not made: {os.strerror(errno.ENOSPC)}" in capsys.readouterr().err
    packed(model, tmp_path / "out")


@pytest.mark.rule("PACK-2")
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_config("mixtral"))
    dense = write_checkpoint(tmp_path / "dense", tiny_config("llama"))
    stacks = write_checkpoint(tmp_path / "stacks", tiny_config("gpt_oss"))
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    for words, said in (
        ([model, tmp_path / "there"], "there: exists already"),
        ([model, tmp_path / "file"], "file: exists already"),
        ([model, tmp_path / "link"], "link: exists already"),
        ([model, tmp_path / "no" / "out"], "no: cannot be written"),
        ([dense, tmp_path / "out"], "a dense model has no experts to align"),
        ([stacks, tmp_path / "out"], "unsupported experts stacked in one tensor"),
        ([tmp_path / "nowhere", tmp_path / "out"], "nowhere: no such folder"),
        ([model, tmp_path / "out", "--shard", "0B"], "--shard: 0 bytes"),
    ):
        assert main(["pack", *map(str, words)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "precious"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    assert main(["pack", str(model), str(tmp_path / "out")]) == 2
    assert "4.88 KiB are free; the copy takes" in capsys.readouterr().err
    assert not [p for p in os.listdir(tmp_path) if p.startswith(".out") or p == "out"]
