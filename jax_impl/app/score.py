"""Score given texts: teacher-forced logits and perplexity.

Writes float32 logits/<id> of shape [tokens, vocabulary] to a safetensors file, row by row as they
come; row p holds what the model says after token p. Prints the perplexity of each text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_impl.app import engines
from jax_impl.app.output import Progress, WholeFile
from jax_impl.app.text import Text
from jax_impl.app.waiting import Interrupt, run_all
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.vocab.errors import CoveyError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey score`."""
    engines.arguments(parser)
    parser.add_argument("--ids", metavar="F", type=Path, required=True,
                        help="texts, as the requests of covey run (only id and prompt are used)")
    parser.add_argument("--out", metavar="F", type=Path,
                        help="safetensors file for the logits (default: perplexity only)")
    parser.add_argument("--log", metavar="EVENTS", type=Path, help="write the event log here")


class LogitsFile:
    """A safetensors file of known shapes whose rows arrive in any order of texts (APP-9).

    The header is written first; each row then has its place, so nothing is held in memory.
    """

    def __init__(self, out: WholeFile, lengths: dict[str, int], vocab: int) -> None:
        self._out, self._row, self.vocab = out, 4 * vocab, vocab
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"row": "logits after the token at this row"}}
        at = 0
        for name, length in lengths.items():
            self._starts[name] = at
            end = at + length * self._row
            header[f"logits/{name}"] = {
                "dtype": "F32", "shape": [length, vocab], "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._put(0, len(text).to_bytes(8, "little") + text)

    def put(self, name: str, position: int, row: np.ndarray) -> None:
        """Row `position` of the text `name`. Raises CoveyError when the disk does not take it."""
        at = self._base + self._starts[name] + position * self._row
        self._put(at, np.ascontiguousarray(row, "<f4").tobytes())

    def _put(self, at: int, data: bytes) -> None:
        try:
            while data:
                done = os.pwrite(self._out.file.fileno(), data, at)
                data, at = data[done:], at + done
        except OSError as error:
            raise CoveyError(f"{self._out.flag}: {self._out.target}: {error.strerror}") from None


class Score:
    """One text: takes its rows as they come, in order, and keeps a sum."""

    def __init__(self, request: Request, file: LogitsFile | None) -> None:
        assert isinstance(request.prompt, tuple)
        self.id, self.tokens, self.file = request.id, request.prompt, file
        self.rows = 0
        self.nats = 0.0
        self.failed = ""

    def take(self, position: int, row: np.ndarray) -> None:
        """Logits [V] after the token at `position`."""
        self.rows += 1
        if self.file is not None and not self.failed:
            try:
                self.file.put(self.id, position, row)
            except CoveyError as error:
                self.failed = str(error)  # told when the text ends: this is the engine's thread
        if position + 1 < len(self.tokens):
            wide = row.astype(np.float64)
            top = wide.max()
            self.nats += float(
                top + np.log(np.exp(wide - top).sum()) - wide[self.tokens[position + 1]])

    def complete(self) -> bool:
        """Every row came; those that did not are NaN in the file."""
        missing = range(self.rows, len(self.tokens))
        if self.file is not None and not self.failed:
            nothing = np.full(self.file.vocab, np.nan, np.float32)
            for position in missing:
                self.file.put(self.id, position, nothing)
        return not missing

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of the tokens after the first; NaN for one."""
        predicted = len(self.tokens) - 1
        return perplexity(self.nats, predicted)


def perplexity(nats: float, predicted: int) -> float:
    """exp(nats / predicted); NaN where nothing is predicted, inf beyond a double."""
    if not predicted:
        return math.nan
    try:
        return math.exp(nats / predicted)
    except OverflowError:
        return math.inf


def run(args: argparse.Namespace) -> int:
    """0 when every text was scored, 1 otherwise."""
    from jax_impl.app.main import INTERRUPTED

    model = engines.model_of(args)
    options = engines.options_of(args)
    progress = Progress(args.quiet)
    requests = [replace(r, max_new_tokens=0, stop=())
                for r in engines.requests_of(args.ids, model, Text(model), 0)]
    checkpoint = Checkpoint.open(model)
    checkpoint.close()
    options |= {"log": args.log}
    if args.engine == "jax":
        options |= {"progress": progress.say, "warn": progress.warn}
    with ExitStack() as stack:
        file = out = None
        if args.out:
            out = stack.enter_context(WholeFile("--out", args.out, "wb"))
            file = LogitsFile(out, {r.id: len(r.prompt) for r in requests},
                              checkpoint.config.vocab)
        interrupt = stack.enter_context(Interrupt())
        scores = {r.id: Score(r, file) for r in requests}
        with engines.open_engine(args.engine, model, options) as engine:
            handles = run_all(
                requests, lambda r: engine.submit(r, on_logits=scores[r.id].take), progress,
                interrupt, virtual=args.engine == "reference")
        engines.totals_of(engine)
        status = report(list(scores.values()), handles)
        if out:
            out.commit()
    return INTERRUPTED if interrupt.noted else status


def report(scores: Sequence[Score], handles: Sequence[Any]) -> int:
    """Prints one line a text and the total; 1 if a text was not scored."""
    status, nats, predicted = 0, 0.0, 0
    for score, handle in zip(scores, handles, strict=True):
        result = handle.result() if handle is not None else None
        complete = score.complete()
        if score.failed:
            raise CoveyError(score.failed)
        if not complete:
            status = 1
            reason = result.error or result.finish_reason if result else "cancelled"
            print(f"{score.id}: not scored ({score.rows} of {len(score.tokens)} rows): {reason}")
            continue
        nats += score.nats
        predicted += len(score.tokens) - 1
        print(f"{score.id}: {len(score.tokens)} tokens, perplexity {score.perplexity:.4f}")
    print(f"{predicted} predicted tokens, perplexity {perplexity(nats, predicted):.4f}")
    return status
