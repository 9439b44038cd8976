"""A virtual run of a scheduler on a platform, with the figures of its steady state (SIM-10).

from reference.simulator import models, platforms
from reference.simulator.run import control, routes_for, simulate

model = models.load("qwen3-30b-a3b")
options = control(model, 0.5, requests=8, grouping="lockstep")
result = simulate(platforms.load("jetson-thor"), model, routes_for(model), options, requests=8)
print(result.tokens_per_s, result.bound_share)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from reference.control import Scheduler
from reference.control.cache import ExpertCache
from reference.prediction import Predictor, simulated
from reference.prediction.accuracy import Accuracy, Watched
from reference.prediction.listener import Listener, Predicting
from reference.simulator import synthetic
from reference.simulator.arrivals import Arrival
from reference.simulator.costs import Costs, Reading, Roofline
from reference.simulator.loop import Log, VirtualLoop
from reference.simulator.meter import Meter, percentile
from reference.simulator.models import ModelShape
from reference.simulator.platforms import Platform
from reference.simulator.routes import Progress, RoutedExecutor, RoutesOf, RouteSource
from reference.vocab.errors import BadInput
from reference.vocab.events import Arrived
from reference.vocab.ids import ExpertKey
from reference.vocab.options import ControlOptions


@dataclass(frozen=True)
class Result:
    """Figures of the measured window, after the warm-up; times in virtual seconds; None where
    nothing in the window tells (SIM-10).

    tokens_per_s    generated tokens of all requests, a second; end_to_end_per_s: the same over the
                    whole run, from the first arrival on, prompts and cold cache included
    visits_per_s    decoding visits to layers with experts, by the number of such layers: tokens a
                    second without the chance of which tokens end within a short window;
                    steady: the visits of its second half over those of its first
    fetches_per_token, bytes_per_token   loads begun in the window, by its tokens
    channel_busy, compute_busy, both_busy   shares of the window
    bound_share     max(compute_busy, channel_busy): 1 is the best that a schedule with these steps
                    and these loads could do (SIM-4)
    batch_mean, batches   requests of a step with experts: the mean, and how often each number
    distinct_mean   distinct experts of such a step
    lag_max, lag_p95   greatest progress minus least among decoding requests, in layer visits;
                    lag_max_tokens the former in tokens
    hit_rate        of the experts that decoding visits named, those that were there then; full_hit
                    of those visits, those that lacked none
    tpot_p50, tpot_p99   seconds a token of a request, over requests of five tokens or more;
                    itl_p50, itl_p99 over tokens
    prediction      of the whole run (reference.prediction.accuracy), where there is a predictor
    stalls          shares of the window by reason (reference.simulator.meter.STALLS)
    finished, refused   requests that came to their end, and those that can never fit, of the
                    whole run
    events, actions over the whole run; wall_s, cpu_s: what simulating it took, in real time and on
    the processor; events_per_s: events and actions, a second of real time
    """

    seconds: float
    tokens: int
    tokens_per_s: float
    end_to_end_per_s: float
    visits_per_s: float
    steady: float
    fetches_per_token: float
    bytes_per_token: float
    guesses: int
    channel_busy: float
    compute_busy: float
    both_busy: float
    bound_share: float
    batch_mean: float | None
    batches: dict[int, int]
    distinct_mean: float | None
    lag_max: int
    lag_p95: float
    lag_max_tokens: float
    hit_rate: float | None
    full_hit: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    finished: int
    refused: int
    stalls: dict[str, float] = field(default_factory=dict)
    prediction: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    actions: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def events_per_s(self) -> float:
        """Events and actions a second of real time."""
        return (self.events + self.actions) / self.wall_s if self.wall_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "events_per_s": self.events_per_s
        }


def control(
    model: ModelShape, cache_share: float, requests: int = 32, **policies: Any
) -> ControlOptions:
    """Options for a share of all experts in slots; `policies` are fields of ControlOptions."""
    if not 0 < cache_share <= 1:
        raise BadInput(f"cache_share: {cache_share}; above 0 and at most 1 expected")
    slots = max(model.top_k, round(cache_share * model.all_experts))
    known = {f.name for f in fields(ControlOptions)}
    if unknown := sorted(set(policies) - known):
        raise BadInput(f"no option {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    given: dict[str, Any] = {"max_running": requests, "max_rows": max(64, requests)} | policies
    return ControlOptions(
        layers=model.moe_layers, experts=model.experts, top_k=model.top_k, slots=slots, **given
    )


def routes_for(model: ModelShape, seed: int = 0) -> RouteSource:
    """The synthetic router nearest to a model: by what was measured of Qwen3-30B-A3B, gpt-oss-120b,
    DeepSeek-V2-Lite and OLMoE; no favourites for others, as in Mixtral."""
    layers = len(model.moe_layers)
    shares = {
        (128, 8, 48): synthetic.qwen3_shares,
        (128, 4, 36): lambda: synthetic.gpt_oss_shares(layers),
        (32, 4, 24): lambda: synthetic.gpt_oss_shares(layers),
        (64, 6, 26): lambda: synthetic.deepseek_v2_lite_shares(layers),
        (64, 8, 16): lambda: synthetic.olmoe_shares(layers),
    }.get((model.experts, model.top_k, layers), lambda: synthetic.uniform_shares(layers))()
    return synthetic.SyntheticRouter(shares, model.experts, model.top_k, seed)


def warm_slots(options: ControlOptions, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """Experts drawn at random, as many a layer as its share of the slots: a cache that is full
    before the first request comes, of nothing in particular."""
    rng = random.Random(seed)
    layers = len(options.layers)
    out = []
    for i, layer in enumerate(options.layers):
        count = options.slots * (i + 1) // layers - options.slots * i // layers
        chosen = rng.sample(range(options.experts), min(count, options.experts))
        out += [(layer, e) for e in chosen]
    rng.shuffle(out)
    return tuple(out)


def lengths(requests: int, new_tokens: int) -> Callable[[int], int]:
    """Tokens to generate of request n in a closed loop: `new_tokens`, but for the first ones, which
    end spread over that time, so that their followers do not all begin at once."""

    def length(n: int) -> int:
        if n >= requests:
            return new_tokens
        return max(1, round(new_tokens * (n + 1) / requests))

    return length


def simulate(
    platform: Platform | None,
    model: ModelShape,
    routes: RouteSource,
    options: ControlOptions,
    *,
    requests: int = 8,
    tokens: int = 256,
    warm_up: int = 64,
    prompt: int = 1,
    new_tokens: int = 64,
    shapes: Callable[[int], tuple[int, int]] | None = None,
    arrivals: Sequence[Arrival] | None = None,
    warm: bool = True,
    cache: ExpertCache | None = None,
    stored: str = "",
    reading: Reading | None = None,
    costs: Costs | None = None,
    predict: str | Predictor = "",
    log: Log | None = None,
    seed: int = 0,
) -> Result:
    """Run until `tokens` were generated after the first `warm_up`, in a closed loop one a request
    at least.

    In a closed loop `requests` are always there: who ends is replaced at once by one of `prompt`
    prompt tokens that generates `new_tokens`; `shapes` gives both for request n instead. With
    `arrivals` requests come as those say, and the run ends with the last at the latest. `warm`
    fills the slots before the first request comes; `cache` is slots that others filled. `costs`
    stands for the platform's own (`stored`: format of the experts; `reading`: how they are read).
    `predict` names a predictor of `reference.prediction.simulated`, or is one made with these
    options; `options.prefetch` says how much of it is read ahead. Raises BadInput where a request
    of a closed loop can never fit, and where nothing is generated after the warm-up.
    """
    if costs is None:
        if platform is None:
            raise BadInput("simulate: neither a platform nor costs")
        costs = Roofline(platform, model, reading, stored)
    if requests < 1 or tokens < 1 or warm_up < 0:
        raise BadInput(f"simulate: {requests} requests, {tokens} tokens after {warm_up}")
    if warm and cache is None and not options.warm:
        options = options.with_(warm=warm_slots(options, seed))
    length = lengths(requests, new_tokens)
    closed = arrivals is None

    def shape(n: int) -> tuple[int, int]:
        if arrivals is not None:
            return arrivals[n].prompt_len, arrivals[n].new_tokens
        return shapes(n) if shapes is not None else (prompt, length(n))

    count = 0

    def arrive() -> list[Arrived]:
        nonlocal count
        n, count = count, count + 1
        executor.progress[n] = Progress(loop.now)
        return [Arrived(n, *shape(n))]

    def ended(number: int) -> None:
        if closed:
            p = executor.progress[number]
            if p.refused:  # its follower would be refused at the same moment, and so on for ever
                raise BadInput(f"simulate: request {number}: {p.reason}")
            loop.at(loop.now, arrive)

    meter = Meter()
    executor = RoutedExecutor(
        RoutesOf(routes, options.layers, shape), options.layers, options.chunk, options.slots,
        shape, lambda: loop.now, ended,
    )  # fmt: skip
    scheduler = Scheduler(options)
    if cache is not None:
        scheduler.cache = cache.copy()
        keys = [ExpertKey(*scheduler.key_of(c)) if c >= 0 else None for c in cache.code]
        executor.slots = keys
    if isinstance(predict, Predictor):
        said = predict
    else:
        said = simulated(predict, options, executor.truth, seed)
    accuracy = Accuracy(options.prefetch)
    loop = VirtualLoop(
        scheduler, Predicting(executor, Listener(said, options)) if said else executor,
        model.bytes_of(stored), costs, log,
        observer=Watched(accuracy, meter) if said else meter,
    )  # fmt: skip
    began, used = time.perf_counter(), time.process_time()
    _settle(loop, options)
    start = loop.now
    if arrivals is None:
        for _ in range(requests):
            loop.at(start, arrive)
    else:
        for a in arrivals:
            loop.at(start + a.at_s, arrive)
    _run(loop, executor, meter, tokens, warm_up, requests if closed else 1)
    took = time.perf_counter() - began, time.process_time() - used
    if not meter.tokens or not meter.seconds:
        raise BadInput(_nothing(executor, warm_up))
    result = _result(loop, executor, meter, model, start, took)
    return replace(result, prediction=accuracy.as_dict()) if said else result


def _settle(loop: VirtualLoop, options: ControlOptions) -> None:
    """Let the warm loads run before anybody comes."""
    if options.warm:
        loop.at(0.0, list)
        loop.run()


def _run(
    loop: VirtualLoop, executor: RoutedExecutor, meter: Meter, tokens: int, warm_up: int,
    least: int,
) -> None:  # fmt: skip
    """Tick until enough was generated, `least` in the window (the moment that ends the warm-up may
    bring more than both), or nothing is left to happen."""
    enough = warm_up + tokens
    if not warm_up:
        meter.begin(loop)
    while loop.tick():
        if not meter.on and executor.generated >= warm_up:
            meter.begin(loop)
            enough = max(enough, executor.generated + least)
        if executor.generated >= enough:
            break
    meter.end(loop)


def _nothing(executor: RoutedExecutor, warm_up: int) -> str:
    """Why there are no figures, in one line."""
    refused = [n for n, p in executor.progress.items() if p.refused]
    if refused and len(refused) == len(executor.progress):
        n = refused[0]
        return f"simulate: every request is refused; request {n}: {executor.progress[n].reason}"
    return (f"simulate: {executor.generated} tokens in all, none after a warm-up of {warm_up}; "
            "a shorter one expected")  # fmt: skip


def _result(
    loop: VirtualLoop, executor: RoutedExecutor, meter: Meter, model: ModelShape, start: float,
    took: tuple[float, float],
) -> Result:  # fmt: skip
    tpot, itl = [], []
    finished = refused = 0
    for p in executor.progress.values():
        times = [t for t in p.token_s if meter.began <= t <= meter.ended]
        gaps = [b - a for a, b in pairwise(times)]
        itl += gaps
        if len(gaps) >= 4:
            tpot.append(sum(gaps) / len(gaps))
        finished += p.ended is not None and not p.refused
        refused += p.refused
    figures = meter.figures(loop.expert_bytes, len(model.moe_layers))
    return Result(
        **figures,
        end_to_end_per_s=executor.generated / max(1e-12, loop.now - start),
        tpot_p50=_percentile(tpot, 0.5), tpot_p99=_percentile(tpot, 0.99),
        itl_p50=_percentile(itl, 0.5), itl_p99=_percentile(itl, 0.99),
        finished=finished, refused=refused, events=meter.events, actions=meter.actions,
        wall_s=took[0], cpu_s=took[1],
    )  # fmt: skip


def _percentile(values: Sequence[float], share: float) -> float | None:
    return percentile(values, share) if values else None
