"""S12 and S13: the same request gets the same tokens and logits, whoever else is there.

A `Book` holds, for each request that was asked (its prompt and how its tokens are chosen), what
came out of it, token by token, over all logs that it has been shown. They must be logs of one
model and one set of the options that bits depend on (`kin`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from oracle.checkers.records import LogView, Violation

BITS = ("engine", "model", "versions", "dtype", "compute", "kv_dtype", "tile", "wide", "backend")
"""Fields of the head that bits may depend on, beside options.kv_block."""


def differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In which of the fields that bits depend on two heads differ."""
    names = [name for name in BITS if one.get(name) != other.get(name)]
    blocks = [(head.get("options") or {}).get("kv_block") for head in (one, other)]
    return names + ["options.kv_block"] * (blocks[0] != blocks[1])


def kin(head: Mapping[str, Any]) -> str:
    """Equal for logs whose requests must have equal bits, as far as their heads tell."""
    options = head.get("options") or {}
    return repr([head.get(name) for name in BITS] + [options.get("kv_block")])


class Token(NamedTuple):
    """One Sampled: the token (None: a score of the same prompt, whose last logits are those that a
    token would be taken from), the checksum of its logits or None, and its place."""

    token: int | None
    sum: int | None
    where: str
    line: int


@dataclass
class Life:
    """What one request got in one run. calm: how many of its tokens came before another request
    was cancelled."""

    request: int
    asked: str
    tokens: list[Token] = field(default_factory=list)
    calm: int = 0


def lives(log: LogView, name: str) -> list[Life]:
    """The requests of a log that say what was asked (`asked` on Arrived), in order of arrival."""
    found: dict[int, Life] = {}
    alive: set[int] = set()
    cancelled: set[int] = set()
    for line in log.lines:
        record = line.record
        if line.name == "Arrived":
            request = record["request"]
            alive.add(request)
            if isinstance(record.get("asked"), str):
                found.setdefault(request, Life(request, record["asked"]))
        elif line.name == "Cancelled" and record["request"] in alive:
            cancelled.add(record["request"])
        elif line.name == "Sampled" and record["request"] in found:
            life = found[record["request"]]
            life.tokens.append(Token(record["token"], record.get("sum"), name, line.number))
            if not cancelled - {life.request}:
                life.calm = len(life.tokens)
        elif line.kind == "action" and line.name in ("Finish", "Reject"):
            alive.discard(record["request"])
    return list(found.values())


class Book:
    """What each request got, by place in its text: in calm, and after somebody was cancelled."""

    def __init__(self) -> None:
        self.calm: dict[str, dict[int, Token]] = {}
        self.disturbed: dict[str, dict[int, Token]] = {}
        self.compared = 0
        """Tokens that were held against another's."""

    def add(self, log: LogView, name: str = "this log") -> Iterator[Violation]:
        """SAFE-13 between the calm, else SAFE-12; a violation stands in `log`."""
        for life in lives(log, name):
            calm = self.calm.setdefault(life.asked, {})
            disturbed = self.disturbed.setdefault(life.asked, {})
            for place, new in enumerate(life.tokens):
                here = calm if place < life.calm else disturbed
                known = [(calm, "S13" if here is calm else "S12"), (disturbed, "S12")]
                fault = next(self._faults(life, place, new, known), None)
                if fault is not None:
                    yield fault
                    break  # what follows on another token is another text
                here[place] = _both(here.get(place), new)

    def _faults(
        self, life: Life, place: int, new: Token, known: list[tuple[dict[int, Token], str]]
    ) -> Iterator[Violation]:
        for seen, name in known:
            old = seen.get(place)
            if old is None:
                continue
            self.compared += 1
            what = _difference(new, old)
            if what:
                text = f"request {life.request}, token {place}: {what}"
                text += f" at line {old.line} of {old.where}"
                if name == "S12":
                    text += ", and another request was cancelled before one of them"
                yield Violation(name, new.line, text)


def _both(old: Token | None, new: Token) -> Token:
    """What is known of a place, after one more agrees with it: a score has no token, and not every
    log has checksums."""
    if old is None or (old.token is None and new.token is not None):
        return new if old is None or new.sum is not None else new._replace(sum=old.sum)
    return old if old.sum is not None else old._replace(sum=new.sum)


def _difference(new: Token, old: Token) -> str:
    if None not in (new.token, old.token) and new.token != old.token:
        return f"{new.token}, it was {old.token}"
    if None not in (new.sum, old.sum) and new.sum != old.sum:
        return f"logits with checksum {new.sum}, it was {old.sum}"
    return ""


def check_s12(log: LogView) -> Iterator[Violation]:
    """SAFE-12 among equal requests of one log."""
    return (v for v in Book().add(log) if v.property == "S12")


def check_s13(log: LogView) -> Iterator[Violation]:
    """SAFE-13 among equal requests of one log."""
    return (v for v in Book().add(log) if v.property == "S13")
