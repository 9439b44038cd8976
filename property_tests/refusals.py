"""What a refusal must look like, for the tests of everything that reads files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reference.vocab.errors import BadInput


def refused(call: Callable[[], Any], *words: str, kind: type[BadInput] = BadInput) -> str:
    """The message with which `call` is refused: one line of printable ASCII with all `words`."""
    with pytest.raises(BadInput) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, kind), f"{type(caught.value).__name__}: {message}"
    one_line(caught.value)
    for word in words:
        assert word in message, f"'{word}' is not in: {message}"
    return message


def one_line(error: BadInput) -> None:
    """Fails unless the message is one line of printable ASCII (FILE-1)."""
    assert str(error).isascii()
    assert str(error).isprintable()
