"""Ending a request at one of its `stop` texts (APP-12).

An engine knows no text. Here a thread reads the tokens of a request that has stop texts and cancels
it at the first one; tokens that came after the stop are not part of the result, so it does not
depend on how soon the cancel took effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax_impl.app.answer import Answer
from jax_impl.app.text import Text
from reference.files.requests import Request
from reference.vocab.errors import BadInput, RequestFailed


class Stopper:
    """Watches one request; `answer` holds its tokens and text up to the stop."""

    def __init__(self, handle: Any, stops: Sequence[str | int], text: Text) -> None:
        self.answer = Answer(text, stops)
        self._handle = handle
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            for token in self._handle:
                self.answer.push(token)
                if self.answer.stopped:
                    self._handle.cancel()
                    return
        except RequestFailed:
            pass  # the result says why
        self.answer.end()

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
    """`submit`, with a Stopper put `into` the table for every request that has stop texts."""

    def submitted(request: Request) -> Any:
        ids = tuple(stop for stop in request.stop if isinstance(stop, int))
        handle = submit(replace(request, stop=ids))
        if len(ids) < len(request.stop):
            into[request.id] = Stopper(handle, request.stop, text)
        return handle

    return submitted
