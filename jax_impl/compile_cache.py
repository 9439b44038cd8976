"""Compiled executables are kept between runs, in a directory that only the user can write.

The entries are code that the process will run: a directory that others can write, or that belongs
to somebody else, is refused (ENGINE-10).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jax

from reference.vocab.errors import BadInput


def default_directory() -> Path:
    """$XDG_CACHE_HOME/covey/compiled, or ~/.cache/covey/compiled."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "covey" / "compiled"


def use(directory: str | Path | None) -> Path | None:
    """Keep compiled code in `directory` from now on; "auto": see above, unless JAX already has
    one; None leaves everything as it is. Returns the directory in use.

    With "auto" a place that cannot be made or is not private only means that nothing is kept;
    a stated one raises BadInput then.
    """
    if directory is None:
        return None
    auto = directory == "auto"
    if auto and jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return Path(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    path = default_directory() if auto else Path(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        fault = "" if mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else "not private"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault and auto:
        return None
    if fault:
        raise BadInput(f"compile cache {path}: {fault}")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
