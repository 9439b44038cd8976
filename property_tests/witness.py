"""What every test of an engine has seen, held together: the judge of all logs that tests make.

A log is judged by all checkers, with what the callers of its requests got; and its tokens and
checksums of logits are held against those of equal requests in every earlier test of this process
with the same checkpoint and the options that bits depend on (S12, S13).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from oracle.checkers import Book, Violation, check_log, kin
from oracle.checkers.records import view
from oracle.company_rig import row_of
from reference.handle import RequestHandle

BOOKS: dict[str, Book] = {}
"""One for each model and set of options with bits of their own, as the heads of logs tell them."""


def violations(
    records: list[dict[str, Any]], complete: bool = True, handles: Iterable[RequestHandle] = ()
) -> list[Violation]:
    """All that is wrong with a log, head first, and with what `handles` gave."""
    rows = [row_of(handle) for handle in handles if handle.done]
    found = check_log(records, complete=complete, outputs=rows)
    book = BOOKS.setdefault(kin(records[0]), Book())
    test = os.environ.get("PYTEST_CURRENT_TEST", "a test").split(" ")[0]
    return found + list(book.add(view(records, False), test))
