"""The built-in model: MODEL `demo` of every command, a folder inside the package (DEMO-1)."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from reference.vocab.errors import BadInput

NAME = "demo"


def folder() -> Path:
    """The folder of the built-in model. Raises BadInput where it was not installed."""
    path = Path(str(files("jax_impl.app").joinpath("demo_model")))
    if not (path / "config.json").is_file():
        raise BadInput(f"MODEL: the built-in model '{NAME}' is not part of this installation "
                       f"({path} is not there); give a folder with config.json")
    return path


def model(word: str) -> Path:
    """argparse type of MODEL: `demo` is the built-in model, `./demo` a folder of that name."""
    return folder() if word == NAME else Path(word)


def name_of(path: Path) -> str:
    """The word that `model` understands as `path`, for commands that are shown to be repeated."""
    try:
        return NAME if os.path.samefile(path, folder()) else str(path)
    except (BadInput, OSError):
        return str(path)
