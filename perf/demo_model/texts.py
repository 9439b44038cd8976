"""Texts in the public domain -> a byte-level BPE and streams of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
HELD_OUT = "wizard_of_oz"
"""The book that neither the tokenizer nor the network sees."""
SHARES = {"classics": 0.70, "tinyshakespeare": 0.17, "us_inaugural": 0.13}
"""How often a training window comes from each collection."""


@dataclass(frozen=True)
class Texts:
    """train: collection -> its texts; held_out: one whole book."""

    train: dict[str, list[str]]
    held_out: str


def read_texts(folder: Path) -> Texts:
    """All `.txt` files under `folder`/COLLECTION. The held-out book is found by its name."""
    train: dict[str, list[str]] = {}
    held_out = ""
    for collection in SHARES:
        paths = sorted((folder / collection).glob("*.txt"))
        if not paths:
            raise SystemExit(f"{folder / collection}: no .txt files")
        for path in paths:
            text = path.read_text(encoding="utf-8")
            if path.stem == HELD_OUT:
                held_out = text
            else:
                train.setdefault(collection, []).append(text)
    if not held_out:
        raise SystemExit(f"{folder}: no {HELD_OUT}.txt")
    return Texts(train, held_out)


def train_tokenizer(texts: Texts, vocab: int) -> Tokenizer:
    """A byte-level BPE: every text encodes, and decodes to itself. Id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([t for group in texts.train.values() for t in group], trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Token ids int32 of the texts in a row, each with END before it and END at the very end."""
    end = tokenizer.token_to_id(END)
    parts: list[int] = []
    for text in texts:
        parts += [end, *tokenizer.encode(text).ids]
    return np.array([*parts, end], np.int32)


class Windows:
    """Batches of token windows, the same for the same seed and step."""

    def __init__(self, streams: dict[str, np.ndarray], seed: int) -> None:
        self.names = list(SHARES)
        self.streams = [streams[name] for name in self.names]
        self.shares = np.array([SHARES[name] for name in self.names])
        self.seed = seed

    def batch(self, step: int, rows: int, length: int) -> np.ndarray:
        """Ids [rows, length + 1] for one step: inputs and, one further on, targets."""
        rng = np.random.Generator(np.random.PCG64([self.seed, step]))
        out = np.empty((rows, length + 1), np.int32)
        for row, which in enumerate(rng.choice(len(self.shares), rows, p=self.shares)):
            ids = self.streams[which]
            start = int(rng.integers(0, len(ids) - length))
            out[row] = ids[start : start + length + 1]
        return out
