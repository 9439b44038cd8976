"""Ending a request at one of its `stop` texts or ids (APP-12).

An engine knows no text. Here a thread reads the tokens of a request that has stops, cancels it at
the first stop, and cuts the result there; tokens that came after the stop are not part of it, so
the result does not depend on how soon the cancel took effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax_impl.app.text import Text
from reference.files.requests import Request
from reference.vocab.errors import BadInput, RequestFailed


class Stopper:
    """Watches one request. `length` is how many tokens the result has once a stop was met."""

    def __init__(self, handle: Any, stops: Sequence[str | int], text: Text) -> None:
        self.length: int | None = None
        self.cut: str | None = None
        self._handle = handle
        self._ids = {s for s in stops if isinstance(s, int)}
        self._texts = tuple(s for s in stops if isinstance(s, str))
        self._text = text
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        tokens: list[int] = []
        try:
            for token in self._handle:
                tokens.append(token)
                if token in self._ids or self._met(tokens):
                    self.length = len(tokens)
                    self._handle.cancel()
                    return
        except RequestFailed:
            return  # the result says why

    def _met(self, tokens: list[int]) -> bool:
        """Whether the text so far holds a stop; keeps the text before the first one."""
        text = self._text.decode(tokens) if self._texts else None
        found = [at for stop in self._texts if (at := (text or "").find(stop)) >= 0]
        if found:
            self.cut = (text or "")[: min(found)]
        return bool(found)

    def join(self) -> None:
        """Waits until the last token has been looked at; the request must have ended."""
        self._thread.join()


def checked(stops: Sequence[str | int], text: Text, where: str) -> None:
    """Raises BadInput where a stop text is asked for and there is no tokenizer."""
    if text.why_not and any(isinstance(stop, str) for stop in stops):
        raise BadInput(f"{where}: a stop is text, but {text.why_not}; give token ids")


def watching(
    submit: Callable[..., Any], text: Text, into: dict[str, Stopper]
) -> Callable[..., Any]:
    """`submit`, with a Stopper put `into` the table for every request that has stops."""

    def submitted(request: Request) -> Any:
        ids = tuple(stop for stop in request.stop if isinstance(stop, int))
        handle = submit(replace(request, stop=ids))
        if request.stop:
            into[request.id] = Stopper(handle, request.stop, text)
        return handle

    return submitted
