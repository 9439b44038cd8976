"""The demonstration's prompts, and its texts on the screen as they come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TextIO

from jax_impl.app.text import Text
from reference.files.requests import Request
from reference.handle import RequestHandle
from reference.sampling import uniform
from reference.vocab.errors import RequestFailed

PROMPTS = (
    "Once upon a time there was a", "ROMEO:\nWhat", "Fellow-citizens, the government of",
    "The little girl looked at the", "It was a dark and", "My lord, I will not",
    "The people of the United States", "She opened the door and", "The King said to the Queen",
    "In the beginning the", "KING RICHARD:\nMy", "When the old man came home,",
    "There is no reason why", "The Rabbit was still in", "Peace and justice are",
    "He walked along the river until",
)  # fmt: skip
WIDTH = 100
SHOW_S = 0.1


def requests(text: Text, vocab: int, count: int, new: int) -> list[Request]:
    """`count` requests of `new` tokens: texts where there is a tokenizer, else made-up ids."""
    found = []
    for n in range(count):
        if text.why_not:
            ids = tuple(int(uniform(n, i) * vocab) for i in range(4 + n % 5))
        else:
            ids = text.encode(PROMPTS[n % len(PROMPTS)], f"prompt {n}")[:24]
        found.append(Request(f"r{n}", ids, new, temperature=0.7, seed=n + 1))
    return found


class Live:
    """Texts while they come: on a terminal in place, elsewhere each when it has ended."""

    def __init__(self, text: Text, requests: Sequence[Request], stream: TextIO) -> None:
        self.text, self.requests, self.stream = text, requests, stream
        self.live = stream.isatty()

    def watch(self, handles: list[RequestHandle]) -> None:
        """Shows the requests until all have ended."""
        came: list[list[int]] = [[] for _ in handles]
        threads = [threading.Thread(target=_collect, args=(h, into), daemon=True)
                   for h, into in zip(handles, came, strict=True)]
        for thread in threads:
            thread.start()
        left = list(range(len(handles)))
        drawn = False
        while left:
            threads[left[0]].join(SHOW_S)
            done = [n for n in left if not threads[n].is_alive()]
            left = [n for n in left if n not in done]
            if self.live:
                if drawn:
                    self.stream.write(f"\x1b[{len(handles)}A")
                for n, tokens in enumerate(came):
                    self.stream.write("\x1b[2K" + self.line(n, tokens) + "\n")
                drawn = True
            else:
                for n in done:
                    self.stream.write(self.line(n, came[n]) + "\n")
            self.stream.flush()

    def line(self, number: int, tokens: Sequence[int]) -> str:
        """One request on one line: its prompt, a bar, what was generated."""
        request = self.requests[number]
        if self.text.why_not:
            words = " ".join(map(str, [*request.prompt, "|", *tokens]))
            return f"{request.id:>4}  {words}"[:WIDTH]
        prompt = _plain(self.text.decode([int(t) for t in request.prompt]) or "")
        made = _plain(self.text.decode(list(tokens)) or "").rstrip("\ufffd")
        return f"{request.id:>4}  {prompt}|{made}"[:WIDTH]


def _collect(handle: RequestHandle, into: list[int]) -> None:
    try:
        for token in handle:
            into.append(token)
    except RequestFailed:
        return  # the result says why


def _plain(text: str) -> str:
    """Text on one line that leaves a terminal alone."""
    return "".join(c if c.isprintable() else " " for c in text.replace("\n", " / "))
