"""`covey COMMAND ...`: finds the command, runs it, turns expected failures into one line."""

from __future__ import annotations

import argparse
import atexit
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jax_impl.app.output import places_of_their_own
from jax_impl.app.signals import ending_as_ctrl_c
from reference.vocab.errors import BadInput, CoveyError

COMMANDS: dict[str, str] = {
    "demo": "see it work: a built-in model, four schedulers side by side",
    "plan": "what a memory budget buys: sizes, slots, tokens/s to expect",
    "run": "generate for a file of requests under a memory budget",
    "chat": "talk with a model, line by line",
    "score": "log-probabilities of given texts: logits to a file, perplexity printed",
    "verify": "prove on this model that results do not depend on how they were scheduled",
    "check": "judge an event log by the properties S1 to S15 and L1 to L7",
    "replay": "feed an event log through the scheduler and compare every decision",
    "bench": "measure schedulers on a model: budgets, requests at a time, table, picture",
    "pack": "copy a model so that direct reads go straight into memory",
    "trace": "record what routers choose, for simulators; show what tokens share",
    "simulate": "schedulers in virtual time, on platforms and models that are not here",
    "timeline": "draw an event log: Perfetto trace, picture",
    "lamina": "attention offloading: plan pool sizes, compute the paper's tables again",
}
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT (APP-5)."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, without the usage before it (APP-1)."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {one_line(BadInput(message))}", file=sys.stderr)
        sys.exit(2)


def parser_of(command: str) -> argparse.ArgumentParser:
    """The full parser of one command; imports that command's module."""
    # No module is called like one of the standard library.
    module = importlib.import_module(f"jax_impl.app.{'routes' if command == 'trace' else command}")
    parser = OneLineParser(
        prog=f"covey {command}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    module.arguments(parser)
    parser.set_defaults(command=command, execute=module.run)
    return parser


def overview() -> str:
    """What `covey --help` prints."""
    lines = ["usage: covey COMMAND ...", "",
             "Mixture-of-experts inference under a memory budget, many requests interleaved.", ""]
    lines += [f"  {name:8} {text}" for name, text in COMMANDS.items()]
    lines += ["", "covey COMMAND --help says more; covey --version.",
              "Exit status: 0 good, 1 failed run, 2 bad usage or bad input, 130 interrupted."]
    return "\n".join(lines)


def version() -> str:
    """'covey 0.1.0', from the installed distribution."""
    from importlib import metadata

    try:
        return f"covey {metadata.version('covey')}"
    except metadata.PackageNotFoundError:
        return "covey (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; the entry point of `covey`.

    An expected failure is one line on standard error, without a traceback (APP-1). Anything that
    is neither a CoveyError nor the machine's refusal (OSError) is a bug and keeps its traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _any_stream_will_do()
    name = f"covey {words[0]}" if words and words[0] in COMMANDS else "covey"
    try:
        with ending_as_ctrl_c():
            status = dispatch(words)
        sys.stdout.flush()
        return status
    except CoveyError as error:
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        if argv is None:
            atexit.register(_end_at_once)
        return INTERRUPTED


def _end_at_once() -> None:
    """The end of an interrupted process. A thread may be in the midst of a step, in compiled code
    that does not survive the interpreter; nothing is left to be written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _any_stream_will_do() -> None:
    """A closed stream is empty or goes nowhere; what an encoding cannot say becomes an escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def dispatch(words: Sequence[str]) -> int:
    """The command that `words` name; its exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(version())
        return 0
    if words[0] not in COMMANDS:
        print(f"covey: no command {words[0]!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        args = parser_of(words[0]).parse_args(words[1:])
        sys.stdout.flush()
    except SystemExit as stop:  # argparse has said why, or has shown the help
        return stop.code if isinstance(stop.code, int) else 2
    places_of_their_own(vars(args))
    return args.execute(args)


def one_line(error: BaseException) -> str:
    """The error's text on one line, without control characters."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else "?" for c in text) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
