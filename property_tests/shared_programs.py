"""For tests that open many engines in one process: equal programs are compiled once.

An engine keeps its own executables, so the next one compiles them again. Here what has the same
text, donated arguments and device is taken from the last time; the engines' own code is as ever.
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from jax_impl import programs


def share() -> dict[Any, Any]:
    """From now on; the programs by (text, device)."""
    made: dict[Any, Any] = {}

    def compiled(run: Any, donate: Any, shapes: Any, name: str, progress: Any) -> programs.Program:
        lowered = jax.jit(run, donate_argnums=donate).lower(*shapes)
        # Unused arguments are not in the text.
        key = lowered.as_text(), str(lowered.args_info), jax.config.jax_default_device
        if key not in made:
            made[key] = programs.Program(lowered.compile())
        return made[key]

    old = programs.compiled
    for module in list(sys.modules.values()):
        if getattr(module, "compiled", None) is old:
            module.compiled = compiled  # type: ignore[attr-defined]
    return made
