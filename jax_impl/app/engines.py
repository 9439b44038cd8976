"""The flags that `run`, `score` and `verify` share, and opening the engine that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_impl.app import builtin
from jax_impl.app.text import Text
from reference.files.requests import Request, check_ids, read_requests
from reference.vocab.errors import BadInput, Unsupported
from reference.vocab.options import EVICTIONS, PREFETCHERS, READINESS, SCHEDULERS

ENGINES = ("jax", "reference")
SCHEDULER, CACHE = "balanced", "frequency"
"""What commands take unless told otherwise: the fastest of this project's own in most of what was
measured; lock-step is ahead in some (docs/schedulers.md). From Python: the paper's."""

NAMES: dict[str, str] = {
    "memory": "--memory", "host_memory": "--host-memory", "scheduler": "--scheduler",
    "cache": "--cache", "prefetch": "--prefetch", "prefetch_experts": "--prefetch-experts",
    "readiness": "--readiness", "chunk": "--chunk",
    "max_running": "--max-running", "kv_tokens": "--kv-tokens", "threads": "--threads",
    "io": "--io", "compute": "--compute",
}  # fmt: skip
"""Engine options and the flags that set them; an option not given keeps the engine's default."""

JAX_ONLY = frozenset({"threads", "io", "compute", "host_memory"})


def positive(word: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; at least 1 expected")
    return value


def count(word: str) -> int:
    """argparse type: an integer of at least 0."""
    value = int(word)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}; at least 0 expected")
    return value


def one_of(allowed: Sequence[str]) -> dict[str, Any]:
    """argparse keywords for a flag with a fixed set of words (APP-1)."""

    def known(word: str) -> str:
        if word not in allowed:
            raise argparse.ArgumentTypeError(
                f"unsupported {word!r}; supported: {', '.join(allowed)}")
        return word

    return {"type": known, "metavar": "{" + ",".join(allowed) + "}"}


def arguments(parser: argparse.ArgumentParser, *, vary: bool = False) -> None:
    """Adds MODEL and the engine's flags; `vary` leaves out those that `verify` varies itself."""
    parser.add_argument("model", metavar="MODEL", type=builtin.model,
                        help="folder with config.json and safetensors files, or demo: built in")
    group = parser.add_argument_group("the engine")
    group.add_argument("--engine", **one_of(ENGINES), default="jax",
                       help="jax: fast; reference: NumPy, for reading (default: jax)")
    group.add_argument("--memory", metavar="SIZE",
                       help="bytes for routed experts: 4GiB, 512MB, 40%% of them all, or auto")
    group.add_argument("--host-memory", metavar="SIZE",
                       help="bytes of host memory between disk and device; --memory is then the "
                            "device's (jax; default: no such tier)")
    if not vary:
        group.add_argument("--scheduler", **one_of(SCHEDULERS), default=SCHEDULER,
                           help=f"which ready visits run together (default: {SCHEDULER})")
        group.add_argument("--readiness", **one_of(READINESS),
                           help="visit: a visit runs when all its experts are there; "
                                "expert: each expert's tokens run as soon as it is")
        group.add_argument("--cache", **one_of(EVICTIONS), default=CACHE,
                           help=f"which expert goes first (default: {CACHE})")
        group.add_argument("--prefetch", "--predict", **one_of(PREFETCHERS),
                           help="what guesses experts, to be read while nothing that was named is")
        group.add_argument("--prefetch-experts", type=positive, metavar="N",
                           help="experts that are guessed of each visit (default: as many as a "
                                "token uses)")
        group.add_argument("--chunk", type=positive, metavar="N", help="prompt tokens a visit")
    group.add_argument("--max-running", type=positive, metavar="N", help="requests at a time")
    group.add_argument("--kv-tokens", type=positive, metavar="N",
                       help="tokens that the KV cache holds over all running requests")
    group.add_argument("--threads", type=positive, metavar="N", help="reads at a time (jax)")
    group.add_argument("--io", **one_of(("auto", "direct", "buffered")),
                       help="around the page cache or through it (jax)")
    group.add_argument("--compute", **one_of(("f32", "bf16")),
                       help="precision of matrix products (jax)")
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that flags set. Raises Unsupported for one that the engine has not."""
    given = {name: getattr(args, name, None) for name in NAMES}
    options = {name: value for name, value in given.items() if value is not None}
    if args.engine == "reference" and (odd := sorted(JAX_ONLY & options.keys())):
        raise Unsupported(NAMES[odd[0]], "flag with --engine reference", "--engine jax")
    return options


def model_of(args: argparse.Namespace) -> Path:
    """The folder of MODEL. Raises BadInput where there is none."""
    model: Path = args.model
    if not model.is_dir():
        raise BadInput(f"{model}: no such folder")
    return model


def open_engine(kind: str, model: Path, options: dict[str, Any]) -> Any:
    """An engine with the given options; imports it first. Errors as Engine.open has them."""
    if kind == "reference":
        from reference.engine import ReferenceEngine

        return ReferenceEngine.open(model, **options)
    from jax_impl.engine import JaxEngine

    return JaxEngine.open(model, **options)


def requests_of(path: Path, model: Path, text: Text, max_new_tokens: int) -> list[Request]:
    """The requests of a file with prompts as token ids and max_new_tokens settled.

    Raises BadInput for a bad file, an id beyond the vocabulary, a text that cannot be encoded and
    a request longer than the model takes: all before anything heavy is begun (APP-2).
    """
    from dataclasses import replace

    from reference.files.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(model)
    checkpoint.close()
    config = checkpoint.config
    requests = []
    for request in read_requests(path):
        if isinstance(request.prompt, str):
            ids = text.encode(request.prompt, f"request '{request.id}'")
            if not ids:
                raise BadInput(f"request '{request.id}': the prompt has no tokens")
            request = replace(request, prompt=ids)
        check_ids(request, config.vocab)
        request = request.resolve(max_new_tokens)
        total = len(request.prompt) + (request.max_new_tokens or 0)
        if total > config.max_position:
            raise BadInput(
                f"request '{request.id}': {len(request.prompt)} prompt tokens and "
                f"{request.max_new_tokens} new ones; the model takes {config.max_position} together"
            )
        requests.append(request)
    return requests


def totals_of(engine: Any) -> dict[str, Any]:
    """Where the time went, from an engine that is closed. Raises what the engine died of."""
    if failure := getattr(engine, "failure", None):
        raise failure
    return engine.totals if isinstance(engine.totals, dict) else engine.totals()
