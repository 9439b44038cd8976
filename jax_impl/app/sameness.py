"""Running requests under a setting, and comparing each bit by bit with itself alone (APP-10)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_impl.app.settings import Setting
from jax_impl.app.waiting import LOOK_S, Interrupt
from reference.files.requests import Request

Open = Callable[[Setting], Any]
"""Opens an engine with the options of a setting; the engine is a context manager."""


@dataclass
class Trace:
    """What a request gave: tokens, and a digest of the logits after each position."""

    tokens: tuple[int, ...] = ()
    reason: str = ""
    error: str | None = None
    rows: dict[int, bytes] = field(default_factory=dict)

    def take(self, position: int, row: np.ndarray) -> None:
        """Logits [V] float32 after `position`: the digest is of their bits."""
        assert row.dtype == np.float32
        digest = hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=16).digest()
        self.rows[position] = digest


@dataclass(frozen=True)
class Difference:
    """A request that gave something else under `setting` than alone."""

    id: str
    setting: Setting
    what: str


@dataclass
class Verdict:
    """`comparisons` counts requests compared, `tokens` and `rows` what was compared of them."""

    comparisons: int = 0
    tokens: int = 0
    rows: int = 0
    differences: list[Difference] = field(default_factory=list)


def difference(alone: Trace, other: Trace) -> str:
    """The first thing in which two runs of a request differ, or ''."""
    if other.error is not None:
        return f"ended with {other.reason}: {other.error}"
    for at, (a, b) in enumerate(zip(alone.tokens, other.tokens, strict=False)):
        if a != b:
            return f"generated token {at} is {b}, alone it is {a}"
    if len(alone.tokens) != len(other.tokens):
        return f"{len(other.tokens)} tokens, alone {len(alone.tokens)}"
    if alone.rows.keys() != other.rows.keys():
        odd = min(alone.rows.keys() ^ other.rows.keys())
        return f"logits after position {odd} are there only once"
    for position in sorted(alone.rows):
        if alone.rows[position] != other.rows[position]:
            return f"the logits after position {position} have other bits"
    return ""


def traces(
    engine: Any, requests: Sequence[Request], company: str, interrupt: Interrupt
) -> dict[str, Trace]:
    """Runs `requests` in the given company; one Trace a request, by id."""
    found = {request.id: Trace() for request in requests}

    def submit(request: Request) -> Any:
        return engine.submit(request, on_logits=found[request.id].take)

    handles: list[Any] = []
    for group in groups(requests, company):
        started = [submit(request) for request in group]
        handles += started
        if company == "alone":
            wait(started, interrupt)
        elif company == "staggered":
            for handle in started:
                next(iter(handle), None)
        elif company == "cancelled":
            for handle in [engine.submit(noise(request)) for request in requests]:
                tokens = iter(handle)
                next(tokens, None)
                next(tokens, None)
                handle.cancel()
                handles.append(handle)
    wait(handles, interrupt)
    for handle in handles:
        if trace := found.get(handle.id):
            result = handle.result()
            trace.tokens, trace.reason, trace.error = (
                tuple(result.tokens), result.finish_reason, result.error)
    return found


def groups(requests: Sequence[Request], company: str) -> Iterable[Sequence[Request]]:
    """What is submitted at the same moment, moment by moment."""
    if company in ("alone", "staggered"):
        return [[request] for request in requests]
    if company == "reversed":
        return [requests[::-1]]
    if company == "halves":
        return [requests[::2], requests[1::2]]
    return [requests]


def noise(request: Request) -> Request:
    """Another request of the same length, to be cancelled: its prompt is the other's, reversed."""
    assert isinstance(request.prompt, tuple)
    return replace(request, id=f"{request.id} (cancelled)", prompt=request.prompt[::-1],
                   max_new_tokens=max(2, request.max_new_tokens or 0))


def wait(handles: Iterable[Any], interrupt: Interrupt) -> None:
    """Until all have ended. Raises KeyboardInterrupt soon after a Ctrl-C."""
    for handle in handles:
        while not handle.wait(LOOK_S):
            if interrupt.noted:
                raise KeyboardInterrupt


def rescored(engine: Any, requests: Sequence[Request], alone: dict[str, Trace],
             interrupt: Interrupt) -> dict[str, Trace]:
    """Scores prompt and generated tokens as given texts; tokens are taken as they were.

    The last generated token was never fed back, so it is not part of the text.
    """
    texts = []
    for request in requests:
        assert isinstance(request.prompt, tuple)
        tokens = request.prompt + alone[request.id].tokens[:-1]
        texts.append(replace(request, prompt=tokens, max_new_tokens=0, temperature=0.0))
    found = traces(engine, texts, "together", interrupt)
    for name, trace in found.items():
        trace.tokens = alone[name].tokens
    return found


def compare(
    open_engine: Open,
    requests: Sequence[Request],
    base: Setting,
    settings: Sequence[Setting],
    interrupt: Interrupt,
    verdict: Verdict,
) -> Iterator[tuple[Setting, list[Difference]]]:
    """Yields each setting when it is done, with what differed; adds to `verdict` as it goes.

    Settings that follow each other with equal engine options share one engine. `base` is how the
    requests are run alone, first.
    """
    with open_engine(base) as engine:
        alone = traces(engine, requests, "alone", interrupt)
    at = 0
    while at < len(settings):
        options = settings[at].options()
        with open_engine(settings[at]) as engine:
            while at < len(settings) and settings[at].options() == options:
                setting = settings[at]
                at += 1
                if setting.company == "rescored":
                    found = rescored(engine, requests, alone, interrupt)
                else:
                    found = traces(engine, requests, setting.company, interrupt)
                new = []
                for name, trace in alone.items():
                    verdict.comparisons += 1
                    verdict.tokens += len(trace.tokens)
                    verdict.rows += len(trace.rows)
                    # A failure alone is no result to compare with.
                    what = (f"failed alone: {trace.error}" if trace.error is not None
                            else difference(trace, found[name]))
                    if what:
                        new.append(Difference(name, setting, what))
                verdict.differences += new
                yield setting, new
