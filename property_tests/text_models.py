"""Tokenizers made on the spot, and tiny models that have one."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

from tokenizers import (  # noqa: E402
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the covey flies over the hill, the hill is green",
    "naïve café Ω≈ç√ 你好，世界 你好 \U0001f600\U0001f600\U0001f601 \U0001f468‍\U0001f469‍\U0001f467",
    "    def f(x):\n        return x\n\n", "привет мир, привет",
]


@functools.cache
def byte_level() -> Any:
    """Byte-level BPE as GPT-2, Qwen3 and DeepSeek-V3 have it: tokens may be parts of characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["<think>"])
    return made


def _spaced(decoder: Any) -> Any:
    """SentencePiece's way: a mark for the space before a word, bytes for unknown characters."""
    words = ["▁", "▁the", "▁hill", "the", "▁▁", "é", "a", "b", "h", "i", "l", "▁a", ".", "\ufffd"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {word: 259 + n for n, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoder
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return made


@functools.cache
def byte_fallback() -> Any:
    """As Llama-2 and Mixtral have it."""
    return _spaced(decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)]))


@functools.cache
def metaspace() -> Any:
    """The other spelling of the same."""
    return _spaced(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


@functools.cache
def word_piece() -> Any:
    """BERT's way: a mark inside words, and spaces before punctuation taken away."""
    words = ["[UNK]", "the", "hill", "##s", "##é", ".", ",", "'", "do", "n", "not", "s"]
    made = Tokenizer(models.WordPiece({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]"])
    return made


@functools.cache
def suffixes() -> Any:
    """A mark at the end of words, which the last word loses."""
    words = {w: n for n, w in enumerate(["a</w>", "b</w>", "a", "b", "é</w>", "<unk>"])}
    made = Tokenizer(models.BPE(words, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    made.decoder = decoders.BPEDecoder()
    return made


TOKENIZERS = {
    "byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace,
    "word-piece": word_piece, "suffixes": suffixes,
}  # fmt: skip


def characters(vocab: int = 96) -> Any:
    """A token for each of `vocab` characters: the first three are special, the rest printable."""
    names = ["<s>", "<unk>", "</s>", *(chr(33 + n) for n in range(vocab - 3))]
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<s>", "<unk>", "</s>"])
    return made


def begins(made: Any, token: str) -> Any:
    """The tokenizer, with `token` put before every text."""
    made.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, made.token_to_id(token))])
    return made


def model_with_text(
    model: Path, folder: Path, made: Any = None, config: dict[str, Any] | None = None,
    template: str | None = None, generation: dict[str, Any] | None = None,
) -> Path:
    """A copy of a tiny model in `folder`, with a tokenizer and what else is given."""
    shutil.copytree(model, folder)
    (made or characters()).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
