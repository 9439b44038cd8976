"""Prompts and answers as text, by the checkpoint's own tokenizer.json (APP-11).

Needs the package `tokenizers` (the extra `text`); without it, or without the file, token ids are
all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reference.vocab.errors import BadInput

FILE = "tokenizer.json"
FILE_BYTES_MAX = 256 << 20


class Text:
    """Encodes prompts and decodes answers. `why_not` says why text is impossible, '' if it is."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.why_not = ""
        self._tokenizer: Any = None
        path = model / FILE
        if not path.is_file():
            self.why_not = f"{model} has no {FILE}"
            return
        try:
            from tokenizers import Tokenizer
        except ImportError:
            self.why_not = "the package tokenizers is missing (pip install 'covey[text]')"
            return
        if path.stat().st_size > FILE_BYTES_MAX:
            raise BadInput(f"{path}: {path.stat().st_size} bytes, at most {FILE_BYTES_MAX}")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise BadInput(f"{path}: not a tokenizer: {error}") from None

    def encode(self, prompt: str, where: str) -> tuple[int, ...]:
        """Token ids of `prompt`, with the special tokens that the tokenizer adds. Raises BadInput.

        `where` names the request in the message.
        """
        if self._tokenizer is None:
            raise BadInput(f"{where}: the prompt is text, but {self.why_not}; give token ids")
        return tuple(self._tokenizer.encode(prompt).ids)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of generated `tokens` without special tokens; None where there is none."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)
