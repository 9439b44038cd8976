"""The three kinds of failure (FILE-1): bad input, a failed run, and our own bug.

`CoveyError` is the root of every expected failure; the command prints its one line and exits with
its `exit_code`. Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations


class CoveyError(Exception):
    """An expected failure, told in one line: where, what was found, what would be right."""

    exit_code = 1


class BadInput(CoveyError):
    """A file, a field or a flag is wrong."""

    exit_code = 2


class Unsupported(BadInput):
    """Well-formed, but not something this version can do; the message says what it can."""

    def __init__(self, where: str, what: str, supported: str) -> None:
        super().__init__(f"{where}: unsupported {what}; supported: {supported}")


class BudgetTooSmall(BadInput):
    """The memory budget is below the minimum; the message names the number that would do."""


class RequestFailed(CoveyError):
    """One request ended with an error; others go on."""


class IllegalEvent(Exception):
    """An executor broke the protocol of reference.vocab.events. Not an input error: a bug."""


def one_line(error: BaseException) -> str:
    """An expected failure's own words; anything else with the name of its kind."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CoveyError) else f"{type(error).__name__}: {text}"
