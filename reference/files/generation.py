"""What generation_config.json says about choosing tokens (FILE-15).

Its stop tokens are read with config.json (MODEL-9); other keys of it say nothing to Covey.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reference.files import strict_json
from reference.files.regular import inside, read_small
from reference.files.requests import sampling_fields
from reference.files.shards import model_directory
from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput

FILE = "generation_config.json"
MAX_FILE = 16_000_000
KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's own choice, as fields of a request; empty where it makes none.

    Errors: BadInput names the file and the key.
    """
    directory = model_directory(Path(model))
    if not os.path.lexists(directory / FILE):
        return {}
    file = inside(directory, FILE)
    return defaults_of(strict_json.parse(read_small(file, MAX_FILE), place(file)), place(file))


def defaults_of(raw: Any, where: str) -> dict[str, Any]:
    """The same from the file's parsed value.

    FILE-15: sampling is off unless `do_sample` is true, as transformers has it: then the answer is
    greedy, whatever temperature stands there. With it, an absent temperature is 1.
    """
    if not isinstance(raw, dict):
        raise BadInput(f"{where}: an object is needed")
    drawn = raw.get("do_sample")
    if drawn is not None and not isinstance(drawn, bool):
        raise BadInput(f"{where}: do_sample is {show(drawn, 40)}; true or false is needed")
    given = sampling_fields({k: raw[k] for k in KEYS if raw.get(k) is not None}, where)
    if drawn:
        return {"temperature": 1.0} | given
    return {k: v for k, v in given.items() if k == "repetition_penalty"}
