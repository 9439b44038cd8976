"""Special tokens and chat templates, as a model's own files have them (TEXT-5, TEXT-7).

Nothing of them is run here; chat_template.py renders templates in a process of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.files import strict_json
from reference.files.regular import inside, read_small
from reference.files.strict_json import place, show
from reference.vocab.errors import BadInput

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
CONFIG_BYTES_MAX = 16_000_000
TEMPLATE_BYTES_MAX = 1 << 20
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, and its name for messages."""

    name: str
    source: str


@dataclass(frozen=True)
class TokenizerConfig:
    """Special tokens by their role ("bos_token"), whether they are added, and the chat template.

    add_bos, add_eos   None: as tokenizer.json does by itself
    """

    special: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    template: ChatTemplate | None = None


def read_small_text(directory: Path, name: str, limit: int) -> tuple[str, bytes] | None:
    """(the file's place for messages, its bytes), None where there is none. Raises BadInput."""
    if not os.path.lexists(directory / name):
        return None
    file = inside(directory, name)
    return place(file), read_small(file, limit)


def tokenizer_config(model: Path) -> TokenizerConfig:
    """The configuration of a model's directory. Raises BadInput naming file and key."""
    found = read_small_text(model, CONFIG, CONFIG_BYTES_MAX)
    where, raw = "", {}
    if found is not None:
        where, raw = found[0], strict_json.parse(found[1], found[0])
        if not isinstance(raw, dict):
            raise BadInput(f"{where}: an object is needed")
    own = read_small_text(model, TEMPLATE, TEMPLATE_BYTES_MAX)
    if own is not None:
        try:
            template = ChatTemplate(own[0], own[1].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadInput(f"{own[0]}: not UTF-8 (byte {error.start})") from None
    else:
        template = _template(raw.get("chat_template"), where)
    return TokenizerConfig(
        {key: token for key in SPECIAL if (token := _token(raw, key, where)) is not None},
        _flag(raw, "add_bos_token", where),
        _flag(raw, "add_eos_token", where),
        template,
    )


def _flag(raw: dict[str, Any], key: str, where: str) -> bool | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadInput(f"{where}: {key} is {show(value, 40)}; true or false is needed")
    return value


def _token(raw: dict[str, Any], key: str, where: str) -> str | None:
    """A token is its text, or an object with the text as `content`."""
    value = raw.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise BadInput(f"{where}: {key} is {show(value, 40)}; a string is needed")
    return value


def _template(value: Any, where: str) -> ChatTemplate | None:
    """One template, or a list of named ones, of which `default` is taken (TEXT-7)."""
    name = f"{where}: chat_template"
    if isinstance(value, list):
        named = {v["name"]: v.get("template") for v in value
                 if isinstance(v, dict) and isinstance(v.get("name"), str)}
        if "default" not in named:
            raise BadInput(f"{name}: {len(value)} templates, none of them named 'default'")
        value, name = named["default"], f"{name} 'default'"
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadInput(f"{name} is {show(value, 40)}; a string is needed")
    if len(value) > TEMPLATE_BYTES_MAX:
        raise BadInput(f"{name}: {len(value)} characters, at most {TEMPLATE_BYTES_MAX}")
    return ChatTemplate(name, value)
