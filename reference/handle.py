"""What a caller holds of a request: its tokens as they come, its result, a way to give it up."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from hashlib import blake2b

import numpy as np

from reference.files.requests import Request
from reference.vocab.errors import RequestFailed, one_line
from reference.vocab.sampling import Choice, Logprobs

FAILURES = ("error", "rejected")


@dataclass(frozen=True)
class Result:
    """How a request ended. Times are seconds since it was submitted.

    finish_reason  stop | length | cancelled | error | rejected
    error          one line for error and rejected, else None
    token_s        when each token came; ttft_s is the first of them
    logits         float32 [positions, V] where they were asked for, else None: row p predicts the
                   token at p + 1; prompt rows first, no row for the last generated token
    logprobs       one for each token where the request asks for them, else None
    """

    id: str
    tokens: tuple[int, ...]
    finish_reason: str
    error: str | None
    ttft_s: float | None
    token_s: tuple[float, ...]
    logits: np.ndarray | None
    logprobs: tuple[Logprobs, ...] | None = None


def sum_of(row: np.ndarray) -> int:
    """CRC-32 of a row of logits, as event logs tell it (SAFE-13)."""
    return zlib.crc32(np.ascontiguousarray(row).data)


class RequestHandle:
    """One submitted request. Safe to use from any thread; made by `Engine.submit`.

    Raises BadInput for sampling options out of range.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        submitted: float,
        cancel: Callable[[int], None],
        want_logits: bool,
        on_logits: Callable[[int, np.ndarray], None] | None,
        stop_at: Callable[[int], bool] | None = None,
    ) -> None:
        self.request = request
        self.sampling = request.sampling()
        self.number = number
        self.want_logits = want_logits or on_logits is not None
        self._submitted = submitted
        self._cancel = cancel
        self._keep = [] if want_logits else None
        self._on_logits = on_logits
        self._stop_at = stop_at
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._logprobs: list[Logprobs] = []
        self._reason: str | None = None
        self._error: str | None = None
        self._changed = threading.Condition()

    @property
    def asked(self) -> str:
        """16 hex digits of what its tokens depend on: the prompt, and how they are chosen."""
        how = astuple(replace(self.sampling, logprobs=None))
        text = repr(([int(t) for t in self.request.prompt], how))
        return blake2b(text.encode(), digest_size=8).hexdigest()

    # -- the caller's side

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def done(self) -> bool:
        """The request has ended, one way or another."""
        return self._reason is not None

    def cancel(self) -> None:
        """Give up on the request; tokens that came stay. Does nothing once it has ended."""
        if not self.done:
            self._cancel(self.number)

    def __iter__(self) -> Iterator[int]:
        """Tokens as they come. Raises RequestFailed after the last one if the request failed."""
        at = 0
        while True:
            self._until(lambda at=at: len(self._tokens) > at or self.done, None)
            fresh = self._tokens[at:]
            yield from fresh
            at += len(fresh)
            if self.done and at == len(self._tokens):
                if self._reason in FAILURES:
                    raise RequestFailed(f"request {self.id}: {self._error}")
                return

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the request has ended; False when the time ran out first."""
        return self._until(lambda: self.done, timeout_s)

    def _until(self, true: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for the engine's threads; an engine without threads overrides this and works."""
        with self._changed:
            return self._changed.wait_for(true, timeout_s)

    def result(self, timeout_s: float | None = None) -> Result:
        """The outcome, also of a failed request (see `Result.error`). Raises TimeoutError."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"request {self.id} has not ended within {timeout_s} s")
        assert self._reason is not None
        times = tuple(t - self._submitted for t in self._times)
        logits = None if self._keep is None else np.array(self._keep, np.float32)
        return Result(
            self.id, tuple(self._tokens), self._reason, self._error,
            times[0] if times else None, times, logits,
            None if self.sampling.logprobs is None else tuple(self._logprobs),
        )  # fmt: skip

    # -- the engine's side

    def put_logits(self, position: int, row: np.ndarray) -> None:
        """The logits that follow the token at `position`; positions come in order. Nobody can
        write through what is passed on: a token may be chosen from it.

        Raises RequestFailed when `on_logits` does.
        """
        row = row.view()
        row.flags.writeable = False
        if self._keep is not None:
            self._keep.append(row)
        if (tell := self._on_logits) is not None:
            self._call("on_logits", lambda: tell(position, row))

    def stops(self, token: int) -> bool:
        """Whether this token, the next in order, is the request's last (ENGINE-13).

        Raises RequestFailed when `stop_at` does, or its answer has no truth value.
        """
        if (ask := self._stop_at) is not None and self._call("stop_at", lambda: bool(ask(token))):
            return True
        return token in self.request.stop

    @staticmethod
    def _call(name: str, call: Callable[[], bool | None]) -> bool | None:
        """What a caller's function says; whatever it raises is its own request's failure. Only
        the interrupt key, which by chance is pressed meanwhile, is for who runs the program."""
        try:
            return call()
        except BaseException as error:
            main = threading.current_thread() is threading.main_thread()
            if main and isinstance(error, KeyboardInterrupt):
                raise
            raise RequestFailed(f"{name}: {one_line(error)}") from error

    def put_token(self, choice: Choice, now: float) -> None:
        with self._changed:
            self._tokens.append(choice.token)
            self._times.append(now)
            if choice.logprobs is not None:
                self._logprobs.append(choice.logprobs)
            self._changed.notify_all()

    def end(self, reason: str, error: str | None) -> None:
        """The one end of the request; later calls change nothing (S2)."""
        with self._changed:
            if self._reason is None:
                self._error = error or None
                self._reason = reason
                self._changed.notify_all()
