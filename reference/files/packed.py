"""Texts that lie plain or gzipped: told apart by their first bytes, not by their names."""

from __future__ import annotations

import gzip
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import TextIO

from reference.files.regular import reason
from reference.files.strict_json import show
from reference.vocab.errors import BadInput

DAMAGED = (zipfile.BadZipFile, EOFError, RuntimeError, TokenError, ValueError, zlib.error,
           lzma.LZMAError)  # fmt: skip
"""What zipfile and the heads of NumPy's arrays raise for an archive that is not whole, encrypted or
packed in a way that is not read."""


@contextmanager
def opened(path: Path, what: str) -> Iterator[TextIO]:
    """The text of a file. Raises BadInput naming the file, and `what` it should be, while it is
    read too: for what is no UTF-8, and for a damaged archive."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8") as file:
            yield file
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(f"{path}: no {what}: {show(str(error), 80)}") from None
    except OSError as error:
        raise BadInput(f"{path}: {reason(error)}") from None
