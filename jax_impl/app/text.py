"""Prompts and answers as text, by the checkpoint's own tokenizer.json (APP-11, TEXT-5).

Needs the package `tokenizers` (the extra `text`); without it, or without the file, token ids are
all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_impl.app.detokenise import Detokeniser, Kind
from jax_impl.app.extras import missing
from jax_impl.app.tokenizer_config import TokenizerConfig, read_small_text, tokenizer_config
from reference.files.strict_json import show
from reference.vocab.errors import BadInput

FILE = "tokenizer.json"
FILE_BYTES_MAX = 256 << 20


class Text:
    """Encodes prompts and decodes answers. `why_not` says why text is impossible, '' if it is."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.why_not = ""
        self.config = TokenizerConfig()
        self._tokenizer: Any = None
        self._special: frozenset[int] = frozenset()
        self._bytes: frozenset[int] = frozenset()
        found = read_small_text(model, FILE, FILE_BYTES_MAX)
        if found is None:
            self.why_not = f"{model} has no {FILE}"
            return
        try:
            from tokenizers import Tokenizer
        except ImportError:
            self.why_not = missing("tokenizers", "text")
            return
        self.config = tokenizer_config(model)
        try:
            self._tokenizer = Tokenizer.from_buffer(found[1])
        except Exception as error:
            raise BadInput(f"{found[0]}: not a tokenizer: {show(str(error), 300)}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._bytes = self._single_bytes()

    def _single_bytes(self) -> frozenset[int]:
        """The tokens "<0x00>" to "<0xFF>", where the decoder takes them for bytes."""
        probe = self._tokenizer.token_to_id("<0x41>")
        if probe is None or self._tokenizer.decode([probe]) != "A":
            return frozenset()
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(id_ for id_ in ids if id_ is not None)

    def encode(self, prompt: str, where: str) -> tuple[int, ...]:
        """Token ids of `prompt`, with the special tokens that the tokenizer adds. Raises BadInput.

        `where` names the request in the message. TEXT-5: tokenizer_config.json decides about a
        first and a last token where it says so, and a text that brings its own gets no second one.
        """
        plain = self.encode_rendered(prompt, where)
        ids = list(self._tokenizer.encode(prompt).ids)
        if not ids:
            return plain
        extra = len(ids) > len(plain)
        bos, eos = self.id_of("bos_token"), self.id_of("eos_token")
        if bos is None and extra and ids[0] in self._special:
            bos = ids[0]
        if eos is None and extra and ids[-1] in self._special:
            eos = ids[-1]
        if bos is not None:
            has, added = plain[:1] == (bos,), _leading(ids, bos) - _leading(plain, bos)
            ids = _wanted(ids, bos, has, added, self.config.add_bos)
        if eos is not None:
            ids, back = ids[::-1], plain[::-1]
            has, added = back[:1] == (eos,), _leading(ids, eos) - _leading(back, eos)
            ids = _wanted(ids, eos, has, added, self.config.add_eos)[::-1]
        return tuple(ids)

    def encode_rendered(self, prompt: str, where: str) -> tuple[int, ...]:
        """Token ids of a text that has its special tokens already, as a rendered chat has."""
        if self._tokenizer is None:
            raise BadInput(f"{where}: the prompt is text, but {self.why_not}; give token ids")
        return tuple(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of generated `tokens` without special tokens; None where there is none."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self) -> Detokeniser | None:
        """For the text of an answer as it comes; None where there is none."""
        if self._tokenizer is None:
            return None
        return Detokeniser(self._tokenizer.decode, self._kind)

    def _kind(self, token: int) -> Kind:
        if token in self._bytes:
            return "byte"
        if token in self._special or self._tokenizer.id_to_token(token) is None:
            return "silent"
        return "text"

    def id_of(self, role: str) -> int | None:
        """The id of a special token by its role ("eos_token"), None where nothing names it."""
        token = self.config.special.get(role)
        if token is None or self._tokenizer is None:
            return None
        return self._tokenizer.token_to_id(token)


def _leading(ids: Sequence[int], token: int) -> int:
    """How many of `token` stand first."""
    return next((n for n, id_ in enumerate(ids) if id_ != token), len(ids))


def _wanted(ids: list[int], token: int, has: bool, added: int, want: bool | None) -> list[int]:
    """`ids` with as many of `token` in front as there should be.

    has     the text begins with one by itself     added   how many the tokenizer put there
    want    what the configuration says, None for nothing
    """
    if has or want is False:
        return ids[max(added, 0) :]
    return [token, *ids] if want and not added else ids
