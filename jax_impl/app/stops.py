"""Ending a request at one of its `stop` texts (APP-12).

An engine knows no text: it asks `stop_at` at every token, and here the answer is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax_impl.app.answer import Answer
from jax_impl.app.text import Text
from reference.files.requests import Request
from reference.vocab.errors import BadInput


def checked(stops: Sequence[str | int], text: Text, where: str) -> None:
    """Raises BadInput where a stop text is asked for and there is no tokenizer."""
    if text.why_not and any(isinstance(stop, str) for stop in stops):
        raise BadInput(f"{where}: a stop is text, but {text.why_not}; give token ids")


def watching(
    submit: Callable[..., Any], text: Text, into: dict[str, Answer]
) -> Callable[..., Any]:
    """`submit`, with the Answer put `into` the table for every request that has stop texts."""

    def submitted(request: Request) -> Any:
        ids = tuple(stop for stop in request.stop if isinstance(stop, int))
        if len(ids) == len(request.stop):
            return submit(request)
        answer = into[request.id] = Answer(text, request.stop)

        def stop_at(token: int) -> bool:
            answer.push(token)
            return answer.stopped

        return submit(replace(request, stop=ids), stop_at=stop_at)

    return submitted
