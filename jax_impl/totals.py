"""Where the time of a run went, how far it was from the bound, and why (ENGINE-9).

Time counts only while there is a request to work on. Every moment is one of three: a step is in
flight (*compute*), none is but a load is (*waiting*), or neither (*other*: deciding, handing over,
nothing to do until a retry). Loads under a step are not waited for: that is the overlap.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from reference.files.budget import show_size
from reference.vocab.ids import ExpertKey

LITTLE = 0.05
"""A share of the time that is not worth a word."""

TOP = 5
"""Layers and experts named as those that were waited for most."""


@dataclass(slots=True)
class Totals:
    """Told by the engine thread as things happen, with times in seconds of one clock."""

    compute_s: float = 0.0
    waiting_s: float = 0.0
    other_s: float = 0.0
    steps: int = 0
    visits: int = 0
    routings: int = 0
    full_hits: int = 0
    named: int = 0
    hits: int = 0
    loads: int = 0
    failed_loads: int = 0
    bytes: int = 0
    host_loads: int = 0
    disk_bytes: int = 0
    channel_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    guesses: int = 0
    guess_bytes: int = 0
    """Of a warm start; those of a predictor are loads like others."""
    heat: dict[ExpertKey, int] = field(default_factory=lambda: defaultdict(int))
    blamed: dict[ExpertKey, float] = field(default_factory=lambda: defaultdict(float))
    _now: float = 0.0
    _open: int = 0
    _step: bool = False
    _flying: int = 0
    _waited: float = 0.0

    def _to(self, now: float) -> None:
        """Book the time since the last change under what was going on."""
        spent = max(0.0, now - self._now)
        self._now = max(self._now, now)
        if self._open:
            if self._step:
                self.compute_s += spent
            elif self._flying:
                self.waiting_s += spent
                self._waited += spent
            else:
                self.other_s += spent
            if self._flying:
                self.channel_s += spent

    def request_opened(self, now: float, prompt: int) -> None:
        self._to(now)
        self._open += 1
        self.requests += 1
        self.prompt_tokens += prompt

    def request_ended(self, now: float, reason: str) -> None:
        self._to(now)
        self._open -= 1
        self.ended[reason] = self.ended.get(reason, 0) + 1

    def step_started(self, now: float) -> None:
        self._to(now)
        self._step = True
        self._waited = 0.0

    def step_ended(self, now: float, visits: int) -> None:
        self._to(now)
        self._step = False
        self.steps += 1
        self.visits += visits

    def load_started(self, now: float) -> None:
        self._to(now)
        self._flying += 1

    def load_ended(
        self,
        now: float,
        key: ExpertKey,
        nbytes: int,
        ok: bool,
        guess: bool = False,
        read: int | None = None,
    ) -> None:
        """What was waited since the last blame is blamed on the load that ended the wait. Loads
        that nobody had asked for (a warm start's) are counted apart. `read` bytes came from the
        disk (None: all of them), 0 from host memory."""
        self._to(now)
        self._flying -= 1
        if guess:
            self.guesses += 1
            self.guess_bytes += nbytes if ok else 0
            return
        self.loads += 1
        self.failed_loads += not ok
        self.bytes += nbytes if ok else 0
        self.host_loads += ok and read == 0
        self.disk_bytes += (nbytes if read is None else read) if ok else 0
        if self._waited:
            self.blamed[key] += self._waited
            self._waited = 0.0

    def routed(self, named: set[ExpertKey], present: int) -> None:
        """A visit has named these experts; `present` of them could be read at once."""
        self.routings += 1
        self.named += len(named)
        self.hits += present
        self.full_hits += len(named) == present
        for key in named:
            self.heat[key] += 1

    @property
    def busy_s(self) -> float:
        """All time with a request open."""
        return self.compute_s + self.waiting_s + self.other_s

    def as_dict(self, now: float, rate: float | None = None) -> dict[str, Any]:
        """The totals by name; times in seconds, sizes in bytes.

        bound_s    max(compute_s, fetch_s): no order of work could have been faster
        fetch_s    bytes from the disk / rate where the channel's rate is known, else the time it
                   was in use
        of_bound   bound_s / wall_s, 1 at best
        """
        self._to(now)
        wall = self.busy_s
        fetch_s = self.disk_bytes / rate if rate else self.channel_s
        bound = max(self.compute_s, fetch_s)
        blamed = sorted(self.blamed.items(), key=lambda item: -item[1])
        layers: dict[int, float] = defaultdict(float)
        for key, seconds in blamed:
            layers[key.layer] += seconds
        top = sorted(layers.items(), key=lambda item: -item[1])[:TOP]
        return {
            "wall_s": wall,
            "compute_s": self.compute_s,
            "waiting_s": self.waiting_s,
            "other_s": self.other_s,
            "channel_s": self.channel_s,
            "fetch_s": fetch_s,
            "bound_s": bound,
            "of_bound": bound / wall if wall else 1.0,
            "bytes": self.bytes,
            "host_loads": self.host_loads,
            "disk_bytes": self.disk_bytes,
            "loads": self.loads,
            "failed_loads": self.failed_loads,
            "guesses": self.guesses,
            "guess_bytes": self.guess_bytes,
            "steps": self.steps,
            "visits": self.visits,
            "experts_named": self.named,
            "hits": self.hits,
            "routings": self.routings,
            "full_hits": self.full_hits,
            "hit_rate": self.hits / self.named if self.named else 1.0,
            "full_hit_rate": self.full_hits / self.routings if self.routings else 1.0,
            "requests": self.requests,
            "ended": dict(self.ended),
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / wall if wall else 0.0,
            "waited_for_layers": [[layer, seconds] for layer, seconds in top],
            "waited_for_experts": [[*key, seconds] for key, seconds in blamed[:TOP]],
        }


def limit(totals: dict[str, Any]) -> str:
    """What held the run up, in words that follow from the numbers: advice on memory is given
    exactly where time was spent waiting for experts, and says how much there is to gain."""
    wall, waiting = totals["wall_s"], totals["waiting_s"]
    if totals["fetch_s"] > totals["compute_s"]:
        return "Fetching was the limit: more memory or a faster disk would help"
    if waiting <= LITTLE * wall:
        if totals["compute_s"] < 0.5 * wall:
            return "Neither was the limit: most of the time nothing was in flight"
        return "Computing was the limit: experts came in time, more memory would not help"
    return (
        f"Computing took longer than fetching, yet experts were waited for {waiting / wall:.0%} of "
        "the time: more memory, or more requests at a time, would help by at most that"
    )


def _guessed(prediction: dict[str, Any]) -> str:
    """What a predictor did, in words (PREDICT-9)."""
    recall = prediction["absent"]["recall"]
    text = f" {prediction['guesses']} of the loads were guesses, {prediction['used']} of them used"
    if recall is not None:
        text += f"; of the experts that were named and absent, {recall:.0%} had been expected"
    return text + "."


def why(totals: dict[str, Any]) -> str:
    """One paragraph for people: what limited the run, and what would help."""
    wall = totals["wall_s"]
    if not wall:
        return "Nothing was run."
    share = {k: totals[k] / wall for k in ("compute_s", "waiting_s", "other_s", "channel_s")}
    text = (
        f"{totals['tokens']} tokens in {wall:.2f} s ({totals['tokens_per_s']:.1f}/s): computing "
        f"{share['compute_s']:.0%} of the time, waiting for experts {share['waiting_s']:.0%}, "
        f"neither {share['other_s']:.0%}; the channel was in use {share['channel_s']:.0%}."
    )
    if not totals["experts_named"]:
        return text + " No experts are fetched here: the processor is the limit."
    text += (
        f" {show_size(totals['bytes'])} came in {totals['loads']} loads; "
        f"{totals['hit_rate']:.0%} of the named experts were there already, and "
        f"{totals['full_hit_rate']:.0%} of the visits found all of theirs."
    )
    if totals["guesses"]:
        text += (
            f" Before the first request {totals['guesses']} experts that had been hot were read "
            f"({show_size(totals['guess_bytes'])})."
        )
    if prediction := totals.get("prediction"):
        text += _guessed(prediction)
    if totals.get("host_slots"):
        text += (
            f" Of the loads {totals['host_loads']} found their expert in host memory; "
            f"{show_size(totals['disk_bytes'])} were read from the disk."
        )
    text += " " + limit(totals)
    if totals["waiting_s"] > LITTLE * wall and totals["waited_for_layers"]:
        most = ", ".join(f"{la} ({s / wall:.0%})" for la, s in totals["waited_for_layers"][:3])
        text += f" (waited longest for layers {most})"
    return text + (
        f". With perfect overlap it would have taken {totals['bound_s']:.2f} s: "
        f"{totals['of_bound']:.0%} of the bound was reached."
    )
