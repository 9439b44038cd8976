"""Safetensors headers, shards, links and reads: what is refused, and that nothing else happens."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.tiny import tiny_config, write_checkpoint
from property_tests.refusals import one_line, refused
from reference.files import regular, strict_json
from reference.files.checkpoint import Checkpoint
from reference.files.safetensors_header import MAX_HEADER, read_header
from reference.vocab.errors import BadInput, CoveyError, Unsupported

INDEX = "model.safetensors.index.json"


def put(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with this header (bytes, or an object to be written as JSON) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model of each family, for tests that copy it."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "mixtral", "qwen3_moe"):
        write_checkpoint(root / family, tiny_config(family, num_hidden_layers=2), shards=1)
    write_checkpoint(root / "sharded", tiny_config("mixtral", num_hidden_layers=2), shards=3)
    return root


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    """A one-file mixtral of its own."""
    return Path(shutil.copytree(made / "mixtral", tmp_path / "m"))


@pytest.fixture
def sharded(made: Path, tmp_path: Path) -> Path:
    """A mixtral of three shards of its own."""
    return Path(shutil.copytree(made / "sharded", tmp_path / "s"))


def index_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / INDEX).read_text())


# The header


@pytest.mark.rule("FILE-5", "FILE-1")
@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", ("begin with",)),
        (b" {}", ("begin with",)),
        (b"[]", ("begin with",)),
        (b"{", ("not JSON",)),
        (b'{"a": 1}', ("'a'", "dtype, shape and data_offsets")),
        (b'{"\xff": 1}', ("not UTF-8",)),
        (b'{"a":1,"a":2}', ("'a'", "twice")),
        (b'{"a": NaN}', ("NaN",)),
        (b'{"__metadata__": 3}', ("__metadata__",)),
        (b'{"__metadata__": {"a": 3}}', ("__metadata__",)),
        (b'{"\xc3\xa9\\n": []}', ("dtype, shape",)),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", ("nested deeper",)),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ("nested deeper",)),
        ({"a": entry() | {"more": 1}}, ("exactly",)),
        ({"a": {"dtype": "F32", "shape": [2]}}, ("exactly",)),
        ({"a": entry(dtype="F33")}, ("F33", "known")),
        ({"a": {**entry(), "dtype": 3}}, ("dtype 3",)),
        ({"a": entry(shape=(-2,))}, ("-2",)),
        ({"a": entry(shape=(2.0,))}, ("2.0",)),
        ({"a": entry(shape=(True, 2))}, ("True",)),
        ({"a": entry(shape=(1 << 60, 1 << 60))}, ("integers from 0",)),
        ({"a": entry(shape=(1 << 40, 1 << 40))}, ("needs", "span 8")),
        ({"a": entry(shape=(1,) * 9)}, ("9 dimensions",)),
        ({"a": {**entry(), "shape": 2}}, ("exactly",)),
        ({"a": entry(shape=(3,))}, ("needs 12 bytes", "span 8")),
        ({"a": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, ("needs 1.5 bytes",)),
        ({"a": entry(offsets=(0,))}, ("two integers",)),
        ({"a": entry(offsets=(0.0, 8.0))}, ("two integers",)),
        ({"a": entry(offsets=(8, 0))}, ("begin <= end",)),
        ({"a": entry(offsets=(-8, 0))}, ("begin <= end",)),
    ],
)
def test_a_bad_entry_is_refused(header: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    path = put(tmp_path / "x.safetensors", header, bytes(8))
    refused(lambda: read_header(path), "x.safetensors", *words)


@pytest.mark.rule("FILE-6")
@pytest.mark.parametrize(
    ("offsets", "size", "words"),
    [
        ([(0, 8), (8, 16)], 15, ("truncated",)),
        ([(0, 8), (8, 16)], 17, ("belong to no tensor",)),
        ([(0, 8), (9, 17)], 17, ("hole", "begin at 8")),
        ([(1, 9), (9, 17)], 17, ("hole", "begin at 0")),
        ([(0, 8), (4, 12)], 16, ("overlap", "begin at 8")),
        ([(0, 8), (0, 8)], 8, ("overlap",)),
    ],
)
def test_data_are_covered_exactly(
    offsets: list[Any], size: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    header = {f"t{i}": entry(offsets=o) for i, o in enumerate(offsets)}
    path = put(tmp_path / "x.safetensors", header, bytes(size))
    refused(lambda: read_header(path), *words)
    good = {f"t{i}": entry(offsets=(8 * i, 8 * i + 8)) for i in range(2)}
    assert len(read_header(put(path, good, bytes(16))).tensors) == 2


@pytest.mark.rule("FILE-5")
@pytest.mark.parametrize("claimed", [1 << 63, (1 << 64) - 1, MAX_HEADER + 1, MAX_HEADER, 9])
def test_a_claimed_length_allocates_nothing(claimed: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", claimed) + b"{}")
    tracemalloc.start()
    refused(lambda: read_header(path), f"header length {claimed}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.rule("FILE-5", "FILE-6")
def test_a_sparse_giant_and_tiny_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for size in range(8):
        path.write_bytes(bytes(size))
        refused(lambda: read_header(path), f"{size} bytes")
    path.write_bytes(struct.pack("<Q", MAX_HEADER + 1) + b"{}")
    os.truncate(path, 1 << 30)
    refused(lambda: read_header(path), f"over the limit of {MAX_HEADER}")
    put(path, {"a": entry()}, bytes(8))
    os.truncate(path, 10 << 30)
    refused(lambda: read_header(path), "belong to no tensor", str(10 << 30))


@pytest.mark.rule("FILE-6", "FILE-1")
def test_every_truncation_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    cuts = {len(whole) * i // 64 for i in range(64)}
    for ref in list(read_header(path).tensors.values())[::7]:
        cuts |= {ref.offset - 1, ref.offset, ref.offset + 1, ref.offset + ref.nbytes - 1}
    cuts |= {7, 8, 9, start - 1, start, start + 1, len(whole) - 1}
    for cut in sorted(cuts - {len(whole)}):
        path.write_bytes(whole[:cut])
        message = refused(lambda: Checkpoint.open(model), "model.safetensors")
        assert str(cut) in message or cut < 8


DTYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I64": np.int64, "F64": np.float64}


@pytest.mark.rule("FILE-6", "FILE-10")
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=5),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 99),
)
def test_reads_what_the_library_writes(
    shapes: list[list[int]], dtype: str, seed: int, tmp_path: Path
) -> None:
    draw = np.random.Generator(np.random.PCG64(seed))
    arrays = {f"t{i}": draw.random(s).astype(DTYPES[dtype]) for i, s in enumerate(shapes)}
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, path)
    header = read_header(path)
    assert header.tensors.keys() == arrays.keys()
    data = path.read_bytes()
    for name, ref in header.tensors.items():
        assert (ref.dtype, ref.shape) == (dtype, arrays[name].shape)
        assert data[ref.offset : ref.offset + ref.nbytes] == arrays[name].tobytes()


@pytest.mark.rule("FILE-5", "FILE-6")
@given(
    hits=st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from(b'0123456789{}[]",:-.eaNBF \\u\x00\xff')),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=300)
def test_damage_is_refused_wherever_the_library_refuses(
    hits: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Any change of the header: a refusal or a header that the library reads too."""
    good = {"a": entry(), "b": entry(dtype="BF16", shape=(2, 2), offsets=(8, 16))}
    text = bytearray(json.dumps(good).encode())
    for at, byte in hits:
        text[at % len(text)] = byte
    path = put(tmp_path / "x.safetensors", bytes(text), bytes(16))
    try:
        read_header(path)
    except BadInput as e:
        one_line(e)
        return
    with safetensors.safe_open(path, framework="numpy") as theirs:
        assert sorted(theirs.keys()) == sorted(read_header(path).tensors)


# JSON


@pytest.mark.rule("FILE-2")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", ("not JSON", "line 1")),
        (b"{}{}", ("not JSON",)),
        (b'{"a":1,\n"a":2}', ("'a'", "twice")),
        (b'[{"b":{"c":1,"c":1}}]', ("'c'", "twice")),
        (b"[NaN]", ("NaN",)),
        (b"[-Infinity]", ("-Infinity",)),
        (b"[1e400]", ("1e400", "too large")),
        (b"[-1e999]", ("too large",)),
        (b"[" + b"9" * 5000 + b"]", ("5000 digits",)),
        (b"[" + b"9" * 41 + b"]", ("41 digits",)),
        (b'["\\ud800"]', ("surrogate",)),
        (b'{"\\udfff": 1}', ("surrogate",)),
        (b"\xef\xbb\xbf{}", ("byte order mark",)),
        (b'["\xff"]', ("not UTF-8", "byte 2")),
        (b"[" * 65 + b"]" * 65, ("nested deeper than 64",)),
        (b'{"a":' * 65 + b"1" + b"}" * 65, ("nested deeper",)),
        (b"[" * 200_000, ("not JSON", "nested")),
        (b'["\x01"]', ("not JSON",)),
        (b"[01]", ("not JSON",)),
        (b"[1,]", ("not JSON",)),
    ],
)
def test_json_is_strict(text: bytes, words: tuple[str, ...]) -> None:
    if text.startswith(b"[" * 1000):
        words = ()  # either the depth or the missing end may be told first
    refused(lambda: strict_json.parse(text, "f.json"), "f.json", *words)


@pytest.mark.rule("FILE-2")
def test_json_that_is_fine() -> None:
    assert strict_json.parse(b'{"a":[1,-2.5e3,true,null,"\\ud83d\\ude00"]}', "f") == {
        "a": [1, -2500.0, True, None, "\U0001f600"]
    }
    assert strict_json.parse(b"[" * 64 + b"]" * 64, "f") is not None
    assert strict_json.parse(b"[" + b"9" * 40 + b"]", "f") == [10**40 - 1]


# Directories and formats


@pytest.mark.rule("FILE-8")
@pytest.mark.parametrize(
    "name", ["model.gguf", "pytorch_model.bin", "weights.pt", "x.pkl", "model.ckpt"]
)
def test_other_formats_are_refused_by_name(name: str, model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(b"\x80\x04")
    refused(lambda: Checkpoint.open(model), name, "supported", kind=Unsupported)
    (model / "config.json").unlink()
    refused(lambda: Checkpoint.open(model), name, "supported", kind=Unsupported)
    refused(lambda: Checkpoint.open(model / name), name, "supported", kind=Unsupported)


@pytest.mark.rule("FILE-8")
def test_nothing_of_the_directory_is_run(model: Path) -> None:
    mark = model / "was-run"
    code = f"open({str(mark)!r}, 'w')\n"
    for name in ("modeling_x.py", "configuration_x.py", "conftest.py", "__init__.py", "x.py"):
        (model / name).write_text(code)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_x.X", "AutoModel": "modeling_x.X"}
    (model / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(model) as ckpt:
        ckpt.read(ckpt.tensor("embed"))
    assert not mark.exists()


@pytest.mark.rule("FILE-7", "FILE-1")
def test_what_is_not_a_model_directory(model: Path, tmp_path: Path) -> None:
    refused(lambda: Checkpoint.open(tmp_path / "none"), "none", "no such directory")
    refused(lambda: Checkpoint.open(tmp_path / "a\nb\x1b"), "a\\nb\\x1b")
    refused(lambda: Checkpoint.open(model / "config.json"), "is a file")
    refused(lambda: Checkpoint.open(model / "model.safetensors"), "give the directory")
    refused(lambda: Checkpoint.open("x" * 5000), "no such directory")
    (model / "model.safetensors").rename(model / "other.safetensors")
    refused(lambda: Checkpoint.open(model), INDEX, "other.safetensors")
    (model / "config.json").unlink()
    refused(lambda: Checkpoint.open(model), "no config.json")


# Shards


def spoil(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """An edit of the index file."""

    def edit(directory: Path) -> None:
        index = index_of(directory)
        change(index)
        (directory / INDEX).write_text(json.dumps(index))

    return edit


@pytest.mark.rule("FILE-7", "FILE-3")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.pop("weight_map"), ("weight_map",)),
        (lambda i: i.update(weight_map={}), ("weight_map",)),
        (lambda i: i.update(weight_map=[]), ("weight_map",)),
        (lambda i: i["weight_map"].update(x=3), ("'x'", "3")),
        (lambda i: i["weight_map"].update(x="../x.safetensors"), ("bare file name",)),
        (lambda i: i["weight_map"].update(x="/etc/x.safetensors"), ("bare file name",)),
        (lambda i: i["weight_map"].update(x="a/b.safetensors"), ("bare file name",)),
        (lambda i: i["weight_map"].update(x="a\\b.safetensors"), ("bare file name",)),
        (lambda i: i["weight_map"].update(x="a\0.safetensors"), ("bare file name",)),
        (lambda i: i["weight_map"].update(x=".."), ("'..'", "not a .safetensors")),
        (lambda i: i["weight_map"].update(x=""), ("not a .safetensors",)),
        (lambda i: i["weight_map"].update(x="config.json"), ("config.json",)),
        (
            lambda i: i["weight_map"].update(x="model-00001-of-00003.safetensors"),
            ("not in 'model-00001-of-00003.safetensors'", "x"),
        ),
        (
            lambda i: i["weight_map"].update(
                {"lm_head.weight": "model-00003-of-00003.safetensors"}
            ),
            ("lm_head.weight",),
        ),
        (lambda i: i["weight_map"].pop("lm_head.weight"), ()),
        (lambda i: i["weight_map"].update(x="absent.safetensors"), ("absent", "not there")),
    ],
)
def test_bad_indexes(change: Any, words: tuple[str, ...], sharded: Path) -> None:
    Checkpoint.open(sharded)
    spoil(change)(sharded)
    if not words:  # a tensor that the index forgets, but a shard has, is still found
        assert Checkpoint.open(sharded).has("lm_head")
        return
    refused(lambda: Checkpoint.open(sharded), *words)


@pytest.mark.rule("FILE-7", "FILE-1")
def test_missing_truncated_and_doubled_shards(sharded: Path) -> None:
    second = sharded / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    held = sum(1 for file in index_of(sharded)["weight_map"].values() if file == second.name)
    second.unlink()
    refused(lambda: Checkpoint.open(sharded), second.name, "not there", f"{held} tensors")
    second.write_bytes(whole[:-1])
    refused(lambda: Checkpoint.open(sharded), second.name, str(len(whole) - 1), str(len(whole)))
    first = sharded / "model-00001-of-00003.safetensors"
    second.write_bytes(first.read_bytes())
    refused(lambda: Checkpoint.open(sharded), second.name)
    second.write_bytes(whole)
    spoil(lambda i: i["weight_map"].update({"dup": "extra.safetensors"}))(sharded)
    put(
        sharded / "extra.safetensors",
        {"dup": entry(), "lm_head.weight": entry(offsets=(8, 16))},
        bytes(16),
    )
    refused(lambda: Checkpoint.open(sharded), "lm_head.weight", "extra.safetensors")
    spoil(lambda i: i["weight_map"].update({"dup2": "extra2.safetensors"}))(sharded)
    for name in ("extra", "extra2"):  # neither is in the index
        header = {"dup" + name[5:]: entry(), "twice": entry(offsets=(8, 16))}
        put(sharded / f"{name}.safetensors", header, bytes(16))
    refused(lambda: Checkpoint.open(sharded), "'twice'", "two copies")


@pytest.mark.rule("FILE-3")
def test_links_may_not_leave_the_directory(model: Path, sharded: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    for path in (model / "model.safetensors", sharded / "model-00002-of-00003.safetensors"):
        path.rename(outside)
        path.symlink_to(outside)
        refused(lambda p=path: Checkpoint.open(p.parent), path.name, "leads out")
        path.unlink()
        path.symlink_to(path.name)
        refused(lambda p=path: Checkpoint.open(p.parent), path.name)
        path.unlink()
        outside.rename(path)
        inner = path.with_name("inner.safetensors")
        path.rename(inner)
        path.symlink_to(inner.name)
        Checkpoint.open(path.parent)
    config = model / "config.json"
    config.rename(tmp_path / "config.json")
    config.symlink_to(tmp_path / "config.json")
    refused(lambda: Checkpoint.open(model), "config.json", "leads out")


@pytest.mark.rule("FILE-3")
def test_a_hub_cache_may_link_into_its_blobs_only(made: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0a1b", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in sorted((made / "sharded").iterdir()):
        shutil.copy(file, blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    ckpt = Checkpoint.open(snapshot)
    whole = Checkpoint.open(made / "sharded")
    refs = (ckpt.expert(1, 3)[0], whole.expert(1, 3)[0])
    assert np.array_equal(ckpt.read(refs[0]), whole.read(refs[1]))
    other = tmp_path / "elsewhere.safetensors"
    shard = snapshot / "model-00001-of-00003.safetensors"
    shutil.copy(blobs / f"hash-{shard.name}", other)
    shard.unlink()
    (repository / "other.safetensors").symlink_to(blobs / f"hash-{shard.name}")
    shutil.copy(other, repository / "refs.safetensors")
    for target in ("../../../elsewhere.safetensors", "../../refs.safetensors"):
        shard.symlink_to(target)
        refused(lambda: Checkpoint.open(snapshot), shard.name, "leads out")
        shard.unlink()
    shard.symlink_to("../../other.safetensors")  # in the end, a blob
    Checkpoint.open(snapshot)


@pytest.mark.rule("FILE-4")
@pytest.mark.parametrize("what", ["a pipe", "a directory", "a device", "a socket"])
def test_only_regular_files_are_opened(what: str, sharded: Path) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    path.unlink()
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a directory":
        path.mkdir()
    elif what == "a socket":
        import socket

        with socket.socket(socket.AF_UNIX) as s:
            here = os.getcwd()
            os.chdir(sharded)  # a socket's address is at most about 100 bytes
            try:
                s.bind(path.name)
            finally:
                os.chdir(here)
    else:
        refused(lambda: regular.open_regular(Path("/dev/zero")), "/dev/zero", what)
        return
    begun = time.monotonic()
    refused(lambda: Checkpoint.open(sharded), path.name, what, "regular file")
    assert time.monotonic() - begun < 5


# Reading


@pytest.mark.rule("FILE-10")
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_bits_are_given_as_stored(dtype: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", tiny_config("qwen3_moe"), dtype=dtype, shards=2)
    with Checkpoint.open(path) as ckpt:
        for role in ckpt.roles:
            ref = ckpt.tensor(role)
            got = ckpt.read(ref)
            assert got.dtype == {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]
            data = ref.file.read_bytes()[ref.offset : ref.offset + ref.nbytes]
            assert (got.tobytes(), got.shape) == (data, ref.shape)
        assert ckpt.expert_roles == ("gate", "up", "down")
        sizes = [r.nbytes for e in range(8) for i in range(3) for r in ckpt.expert(i, e)]
        assert sum(sizes) == ckpt.experts_bytes
        assert ckpt.expert_bytes() == ckpt.expert_bytes(1) == ckpt.experts_bytes // 24
        stored = sum(f.stat().st_size for f in ckpt.files)
        assert 0 < stored - ckpt.experts_bytes - ckpt.non_expert_bytes < 20_000


@pytest.mark.rule("FILE-4")
def test_short_and_interrupted_reads_go_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpoint.open(model)
    ref = ckpt.expert(1, 5)[2]
    expected = ckpt.read(ref)
    real, calls = os.preadv, 0

    def stutter(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise InterruptedError(errno.EINTR, "interrupted")
        return real(fd, [memoryview(buffers[0])[: calls % 5 + 1]], offset)

    monkeypatch.setattr(os, "preadv", stutter)
    assert np.array_equal(ckpt.read(ref), expected)
    assert calls > ref.nbytes // 6


@pytest.mark.rule("FILE-1", "FILE-4")
def test_a_read_error_is_told_with_its_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpoint.open(model)
    ref = ckpt.tensor("layers.1.q")

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "io")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CoveyError) as caught:
        ckpt.read(ref)
    assert caught.value.exit_code == 1
    assert f"bytes {ref.offset} to {ref.offset + ref.nbytes}" in str(caught.value)
    monkeypatch.undo()
    assert ckpt.read(ref).shape == (32, 32)


@pytest.mark.rule("FILE-9")
@pytest.mark.parametrize("opened", [False, True])
def test_a_changed_file_is_never_read(model: Path, opened: bool) -> None:
    path = model / "model.safetensors"
    ckpt = Checkpoint.open(model)
    ref = ckpt.expert(0, 0)[0]
    whole = path.read_bytes()

    def check() -> None:
        refused(lambda: ckpt.read(ref), "model.safetensors")
        refused(lambda: ckpt.open_fd(path), "model.safetensors")

    if opened:
        ckpt.read(ref)
    replacement = path.with_name("new")
    replacement.write_bytes(whole)
    replacement.rename(path)  # the same bytes in another file
    check()
    ckpt = Checkpoint.open(model)
    if opened:
        ckpt.read(ref)
    os.truncate(path, len(whole) - 4)
    check()
    path.write_bytes(whole)
    ckpt = Checkpoint.open(model)
    if opened:
        ckpt.read(ref)
    os.utime(path, ns=(0, 1))
    check()
    ckpt = Checkpoint.open(model)
    if opened:
        ckpt.read(ref)
    path.unlink()
    check()


@pytest.mark.rule("FILE-9")
def test_descriptors_are_the_callers_or_closed(model: Path) -> None:
    gc.collect()  # other tests' models
    before = len(os.listdir("/proc/self/fd"))
    ckpt: Checkpoint | None = Checkpoint.open(model)
    assert ckpt.pins.keys() == set(ckpt.files)
    fd = ckpt.open_fd(ckpt.files[0])
    ckpt.check_unchanged(ckpt.files[0], fd)
    os.close(fd)
    for _ in range(3):
        with ckpt:
            ckpt.read(ckpt.tensor("embed"))
    with pytest.raises(ValueError, match="buffer of 3 bytes"):
        ckpt.read_into(ckpt.tensor("embed"), memoryview(bytearray(3)))
    for _ in range(50):
        (model / "config.json").read_text()
        with pytest.raises(BadInput):
            Checkpoint.open(model / "absent")
    ckpt = None
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.rule("FILE-10")
def test_opening_a_big_model_takes_under_a_second(tmp_path: Path) -> None:
    config = tiny_config(
        "qwen3_moe", num_hidden_layers=48, num_experts=128, hidden_size=8, moe_intermediate_size=4
    )
    write_checkpoint(tmp_path, config, dtype="BF16", shards=4)
    times = []
    for _ in range(3):
        begun = time.process_time()
        ckpt = Checkpoint.open(tmp_path)
        times.append(time.process_time() - begun)
        assert len(ckpt.expert(47, 127)) == 3
    assert min(times) < 1.0
