"""Which safetensors files a model directory consists of (FILE-3, FILE-7).

One `model.safetensors`, or the shards that `model.safetensors.index.json` lists. Other formats are
refused by name; nothing is ever unpickled and no code of a model directory is run (FILE-8).
"""

from __future__ import annotations

import os
from pathlib import Path

from reference.files import strict_json
from reference.files.layout import summarise
from reference.files.regular import inside, read_small, reason
from reference.files.safetensors_header import Header, TensorRef, read_header
from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput, Unsupported

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 100_000_000
_SUPPORTED = "a Hugging Face directory with config.json and safetensors weights"
_FOREIGN = {
    ".gguf": "GGUF weights",
    ".ggml": "GGML weights",
    ".bin": "pickled weights",
    ".pt": "pickled weights",
    ".pth": "pickled weights",
    ".pkl": "pickled weights",
    ".ckpt": "pickled weights",
    ".npz": "NumPy weights",
    ".h5": "Keras weights",
    ".msgpack": "Flax weights",
    ".onnx": "ONNX weights",
}


def _foreign(name: str) -> str | None:
    return _FOREIGN.get(os.path.splitext(name)[1].lower())


def model_directory(path: Path) -> Path:
    """`path`, once it is a directory with a config.json.

    Errors: BadInput, or Unsupported for a file or a directory of another format, with advice.
    """
    where = place(path)
    if not os.path.exists(path):
        raise BadInput(f"{where}: no such directory; a model is {_SUPPORTED}")
    if not os.path.isdir(path):
        if what := _foreign(path.name):
            raise Unsupported(where, f"{what} ({show(path.name)})", _SUPPORTED)
        raise BadInput(f"{where}: is a file; give the directory that holds it, {_SUPPORTED}")
    if not os.path.lexists(path / "config.json"):
        _refuse_foreign(path)
        raise BadInput(f"{where}: no config.json in it; a model is {_SUPPORTED}")
    return path


def _listing(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError as e:
        where = place(directory)
        raise BadInput(f"{where}: cannot be listed: {reason(e)}") from None


def _refuse_foreign(directory: Path) -> None:
    """Name the weights of another format that lie where safetensors are missing."""
    for name in _listing(directory):
        if what := _foreign(name):
            raise Unsupported(
                place(directory),
                f"{what} ({show(name)})",
                f"{_SUPPORTED}; convert them with their own tools first",
            )


def read_shards(directory: Path) -> tuple[list[Header], dict[str, TensorRef]]:
    """The checked headers of all files, and every tensor by name.

    Errors: BadInput for an absent file, a bad index, a tensor that is in two shards, in another
    than the index says or in none, and as `read_header`.
    """
    if os.path.lexists(directory / SINGLE):
        header = read_header(inside(directory, SINGLE))
        return [header], header.tensors
    if not os.path.lexists(directory / INDEX):
        _refuse_foreign(directory)
        others = [n for n in _listing(directory) if n.endswith(".safetensors")]
        hint = f" (found {show(', '.join(others))})" if others else ""
        raise BadInput(f"{place(directory)}: neither {SINGLE} nor {INDEX} is in it{hint}")
    return _sharded(directory)


def _sharded(directory: Path) -> tuple[list[Header], dict[str, TensorRef]]:
    where = place(directory / INDEX)
    index = strict_json.parse(read_small(inside(directory, INDEX), MAX_INDEX), where)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{where}: weight_map is needed, an object of tensor name to file name")
    wanted: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise BadInput(f"{where}: weight_map['{show(name)}'] is {show(file)}; needs a string")
        wanted.setdefault(file, []).append(name)
    headers: list[Header] = []
    tensors: dict[str, TensorRef] = {}
    for file, names in sorted(wanted.items()):
        if not file.endswith(".safetensors"):
            raise BadInput(f"{where}: '{show(file)}' in weight_map is not a .safetensors file")
        path = inside(directory, file)
        if not os.path.exists(path):
            raise BadInput(
                f"{where}: the shard '{show(file)}' is not there; it holds {len(names)} tensors"
            )
        header = read_header(path)
        if absent := [name for name in names if name not in header.tensors]:
            raise BadInput(
                f"{where}: not in '{show(file)}', where weight_map puts them: {summarise(absent)}"
            )
        for name, ref in header.tensors.items():
            other = weight_map.get(name, file)
            if other != file or name in tensors:
                raise BadInput(
                    f"{where}: tensor '{show(name)}' is in '{show(file)}', "
                    f"but weight_map puts it in '{show(other)}': two copies, or a wrong index"
                )
            tensors[name] = ref
        headers.append(header)
    return headers, tensors
