"""Request files: JSON lines, or one document `{"requests": [...]}` (FILE-11 to FILE-13).

Every field is checked: an unknown one, a wrong type, a number out of its range, an empty prompt or
an id that is there twice is refused with the line at which it stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from reference.files import strict_json
from reference.files.regular import reason
from reference.files.strict_json import kind, place, show
from reference.vocab.config import ModelConfig
from reference.vocab.errors import BadInput, Unsupported
from reference.vocab.sampling import Sampling

MAX_FILE = 1 << 30
MAX_ID = 256
MAX_STOPS = 64
MAX_STOP = 4096
MAX_TOKENS = (1 << 31) - 1
MAX_SEED = (1 << 64) - 1
FIELDS = (
    "id", "prompt", "max_new_tokens", "arrival_s", "temperature", "top_p", "top_k", "seed", "stop",
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
)  # fmt: skip
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e3), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0), "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}  # fmt: skip
"""Bounds of the numbers that say how tokens are chosen, both included but for those in POSITIVE."""
POSITIVE = ("top_p", "repetition_penalty")
"""Of RANGES, those that may not be 0."""
MAX_LOGPROBS = 100


@dataclass(frozen=True)
class Request:
    """One request as its file says.

    prompt           text, or token ids
    max_new_tokens   tokens to generate at most (0: score the prompt only); None: left to the flag
    arrival_s        seconds after the start of the run
    stop             texts (or token ids) that end the generation
    temperature, top_p, top_k, seed, min_p, the penalties, logprobs
                     as in `Sampling`; None: not said, left to flags and to the model (FILE-14)
    """

    id: str
    prompt: str | tuple[int, ...]
    max_new_tokens: int | None = None
    arrival_s: float = 0.0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str | int, ...] = ()
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None

    def resolve(self, default: int) -> Request:
        """The request with max_new_tokens settled: its own beats `default` (FILE-12)."""
        return self if self.max_new_tokens is not None else replace(self, max_new_tokens=default)

    def with_defaults(self, *defaults: Mapping[str, Any]) -> Request:
        """What the request does not say, from the first of `defaults` that does (FILE-14)."""
        for given in defaults:
            silent = {k: v for k, v in given.items() if getattr(self, k) is None}
            self = replace(self, **silent)
        return self

    def sampling(self) -> Sampling:
        """How its tokens are chosen; what nobody has said is Sampling's own default.

        Raises BadInput for a value out of range.
        """
        said = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        try:
            return Sampling(**{k: v for k, v in said.items() if v is not None})
        except BadInput as error:
            raise BadInput(f"request '{show(self.id)}': {error}") from None


def check_ids(request: Request, vocab: int) -> None:
    """Errors: BadInput if a token id of the request is not in [0, vocab) (FILE-13)."""
    if isinstance(request.prompt, tuple):
        for position, token in enumerate(request.prompt):
            if not 0 <= token < vocab:
                raise BadInput(
                    f"request '{show(request.id)}': prompt[{position}] is {token}; this model's "
                    f"token ids are 0 to {vocab - 1}"
                )
    for token in request.stop:
        if isinstance(token, int) and not 0 <= token < vocab:
            raise BadInput(
                f"request '{show(request.id)}': stop id {token}; this model's token ids are 0 to "
                f"{vocab - 1}"
            )


def check_request(config: ModelConfig, request: Request) -> None:
    """ENGINE-8: what no engine can take is refused before it is queued. Values are as files may
    have them; a prompt is token ids, a stop is a token id, max_new_tokens is said.

    Errors: BadInput or Unsupported name the request, the field, its value and what is right.
    """
    where = f"request '{show(_id(request.id, 'request'))}'"
    prompt, stop = request.prompt, request.stop
    if isinstance(prompt, str):
        raise BadInput(f"{where}: the prompt is text; an engine takes token ids")
    if not isinstance(prompt, tuple) or any(type(t) is not int for t in prompt):
        raise BadInput(f"{where}: the prompt is not a tuple of integers")
    if not prompt:
        raise BadInput(f"{where}: the prompt is empty")
    if not isinstance(stop, tuple):
        raise BadInput(f"{where}: stop is {show(stop, 40)}; a tuple of token ids is needed")
    if any(isinstance(s, str) for s in stop):
        raise Unsupported(where, "stop text", "stop token ids")
    _stop(list(stop), where)
    said = {name: value for name, value in vars(request).items() if value is not None}
    if "max_new_tokens" not in said:
        raise BadInput(f"{where}: max_new_tokens is not given; an integer of at least 0 is needed")
    _integer(said, "max_new_tokens", MAX_TOKENS, 0, where)
    _number(said, "arrival_s", 0.0, 1e9, 0.0, where)
    sampling_fields(said, where)
    check_ids(request, config.vocab)
    size = len(prompt) + said["max_new_tokens"]
    if size > config.max_position:
        raise BadInput(
            f"{where}: {len(prompt)} prompt tokens and {said['max_new_tokens']} new ones; the "
            f"model takes {config.max_position} together"
        )


def request_from(value: Any, where: str, default_id: str = "0") -> Request:
    """One request from its parsed object; `default_id` serves where there is no id.

    Errors: BadInput, beginning with `where`, names the field, its value and what is right.
    """
    v = strict_json.fields(value, where, FIELDS)
    if "prompt" not in v:
        raise BadInput(f"{where}: prompt is missing; text or an array of token ids is needed")
    limit = None
    if "max_new_tokens" in v:
        limit = _integer(v, "max_new_tokens", MAX_TOKENS, 0, where)
    return Request(
        id=_id(v.get("id", default_id), where),
        prompt=_prompt(v["prompt"], where),
        max_new_tokens=limit,
        arrival_s=_number(v, "arrival_s", 0.0, 1e9, 0.0, where),
        stop=_stop(v.get("stop", []), where),
        **sampling_fields(v, where),
    )


def sampling_fields(v: dict[str, Any], where: str) -> dict[str, Any]:
    """Those of an object's fields that say how tokens are chosen, checked; absent ones are absent.

    Errors: BadInput names the field.
    """
    said: dict[str, Any] = {}
    for name, (low, high) in RANGES.items():
        if name in v:
            said[name] = _number(v, name, low, high, low, where)
            if name in POSITIVE and said[name] == 0.0:
                raise BadInput(
                    f"{where}: {name} is 0; a number above 0 and up to {high:g} is needed"
                )
    for name, most in (("top_k", MAX_TOKENS), ("seed", MAX_SEED), ("logprobs", MAX_LOGPROBS)):
        if name in v:
            said[name] = _integer(v, name, most, 0, where)
    return said


def read_requests(path: str | os.PathLike[str]) -> list[Request]:
    """All requests of a file, in its order. Errors: BadInput names the file and the line."""
    where = place(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as e:
        raise BadInput(f"{where}: cannot be read: {reason(e)}") from None
    if len(data) > MAX_FILE:
        raise BadInput(f"{where}: more than {MAX_FILE} bytes")
    return parse_requests(data, where)


def parse_requests(data: bytes, where: str = "requests") -> list[Request]:
    """All requests of a file's bytes, in either form (FILE-11). Errors as `read_requests`."""
    found = list(_document(data, where) or _lines(data, where))
    requests: list[Request] = []
    seen: dict[str, str] = {}
    for line, value in found:
        request = request_from(value, line, str(len(requests)))
        if request.id in seen:
            raise BadInput(f"{line}: the id '{show(request.id)}' is already at {seen[request.id]}")
        seen[request.id] = line
        requests.append(request)
    if not requests:
        raise BadInput(f"{where}: no requests in it")
    return requests


def _document(data: bytes, where: str) -> Iterable[tuple[str, Any]]:
    """The requests of `{"requests": [...]}`; nothing if the file is JSON lines."""
    start = data.lstrip()[:64].replace(b" ", b"").replace(b"\n", b"").replace(b"\r", b"")
    if not start.replace(b"\t", b"").startswith(b'{"requests"'):
        return []
    value = strict_json.fields(strict_json.parse(data, where), where, ("requests",))
    listed = value["requests"]
    if not isinstance(listed, list) or not listed:
        raise BadInput(f"{where}: requests: an array of at least one request is needed")
    return [(f"{where}: requests[{i}]", item) for i, item in enumerate(listed)]


def _lines(data: bytes, where: str) -> Iterable[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            at = f"{where}:{number}"
            yield at, strict_json.parse(line, at)


def write_requests(path: str | os.PathLike[str], requests: Iterable[Request]) -> None:
    """Write requests as JSON lines that `read_requests` gives back equal."""
    with Path(path).open("w", encoding="utf-8") as file:
        for r in requests:
            given = {name: getattr(r, name) for name in FIELDS}
            given = {name: value for name, value in given.items() if value is not None}
            file.write(json.dumps(given) + "\n")


def _id(value: Any, where: str) -> str:
    good = isinstance(value, str) and 0 < len(value) <= MAX_ID and value.isprintable()
    if not good:
        raise BadInput(
            f"{where}: id is {show(value, 40)}; a printable string of 1 to {MAX_ID} characters "
            "is needed"
        )
    return value


def _prompt(value: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        for i, token in enumerate(value):
            if type(token) is not int or not 0 <= token <= MAX_TOKENS:
                raise BadInput(
                    f"{where}: prompt[{i}] is {show(token, 40)}; a token id is an integer of at "
                    "least 0"
                )
        return tuple(value)
    what = "is empty" if value in ("", []) else f"is {kind(value)}"
    raise BadInput(f"{where}: prompt {what}; text or an array of token ids is needed")


def _integer(v: dict[str, Any], name: str, high: int, default: int, where: str) -> int:
    value = v.get(name, default)
    if type(value) is not int or not 0 <= value <= high:
        raise BadInput(
            f"{where}: {name} is {show(value, 40)}; an integer from 0 to {high} is needed"
        )
    return value


def _number(
    v: dict[str, Any], name: str, low: float, high: float, default: float, where: str
) -> float:
    value = v.get(name, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadInput(
            f"{where}: {name} is {show(value, 40)}; a number from {low:g} to {high:g} is needed"
        )
    return float(value)


def _stop(value: Any, where: str) -> tuple[str | int, ...]:
    """A text or an array of texts and token ids."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise BadInput(
            f"{where}: stop is {show(value, 40)}; a string or an array of at most {MAX_STOPS} "
            "strings or token ids is needed"
        )
    for i, item in enumerate(listed):
        text = isinstance(item, str) and 0 < len(item) <= MAX_STOP
        token = type(item) is int and 0 <= item <= MAX_TOKENS
        if not text and not token:
            raise BadInput(
                f"{where}: stop[{i}] is {show(item, 40)}; a string of 1 to {MAX_STOP} characters "
                "or a token id is needed"
            )
    return tuple(listed)
