"""Talk with a model: each line is a turn, answers come as they are made.

On a terminal, Ctrl-C stops the answer and keeps the chat; /reset forgets what was said, /exit or
Ctrl-D ends. From a pipe each line is a turn as well, and answers are all that standard output gets.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_impl.app import engines, sampling_flags
from jax_impl.app.answer import Answer
from jax_impl.app.chat_template import RESERVED, Renderer
from jax_impl.app.conversation import Conversation
from jax_impl.app.listening import Listener, Pause
from jax_impl.app.output import Progress
from jax_impl.app.text import Text
from reference.files import strict_json
from reference.files.checkpoint import Checkpoint
from reference.files.requests import Request
from reference.vocab.errors import BadInput

KV_TOKENS = 8192
"""Tokens of a conversation for which memory is planned, where the model takes as many."""
KV_BLOCK = 64
COMMANDS = "/reset forgets what was said; /exit or Ctrl-D ends; Ctrl-C stops an answer"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `covey chat`."""
    engines.arguments(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="said before the first turn")
    parser.add_argument("--max-new-tokens", type=engines.positive, metavar="N", default=512,
                        help="tokens of an answer at most (default: 512)")
    sampling_flags.arguments(parser, "logprobs")
    parser.add_argument("--template-args", metavar="JSON", default="{}",
                        help="what else the chat template shall see: {\"enable_thinking\": false}")
    parser.add_argument("--no-template", action="store_true",
                        help="what is typed is plain text, which the model continues")
    parser.add_argument("--log", metavar="EVENTS", type=Path, help="write the event log here")


@dataclass
class Chat:
    """A conversation with an open engine."""

    engine: Any
    conversation: Conversation
    text: Text
    most: int
    """Tokens of prompt and answer together."""
    new_tokens: int
    stop: tuple[int, ...]
    defaults: tuple[dict[str, Any], ...]
    write: Callable[[str], None]
    note: Callable[[str], None]
    number: int = 0

    def turn(self, said: str, pause: Pause) -> bool:
        """One question and its answer; False when there was none, and why is told (CHAT-4)."""
        try:
            handle, new = self._submit(said)
        except BadInput as error:
            trouble(str(error))
            return False
        answer, began = Answer(self.text), time.monotonic()
        for token in Listener(handle, pause):
            self.write(answer.push(token))
        self.write(answer.end() + "\n")
        result = handle.result()
        if result.error:
            trouble(result.error)
            return False
        self.conversation.add(said, answer.text or "")
        self.note(summary(result, time.monotonic() - began, new))
        return True

    def _submit(self, said: str) -> tuple[Any, int]:
        """(the handle, how many tokens the answer may have). Raises BadInput."""
        ids = self.conversation.prompt(said)
        room = self.most - len(ids)
        if not ids:
            raise BadInput("there is nothing to continue")
        if room < 1:
            raise BadInput(
                f"the conversation has {len(ids)} tokens and there is room for {self.most}, the "
                "answer included; /reset begins anew")
        self.number += 1
        new = min(self.new_tokens, room)
        request = Request(f"turn {self.number}", ids, new, stop=self.stop)
        return self.engine.submit(request.with_defaults(*self.defaults)), new


def trouble(said: str) -> None:
    """What went wrong, on standard error, also with --quiet."""
    from jax_impl.app.main import one_line

    print(f"covey chat: {one_line(BadInput(said))}", file=sys.stderr, flush=True)


def summary(result: Any, seconds: float, most: int) -> str:
    """One line about an answer."""
    count = len(result.tokens)
    ends = {"length": f"stopped at {most} tokens", "cancelled": "stopped", "stop": "done"}
    rate = f", {count / seconds:.1f} tokens/s" if seconds > 0 else ""
    return f"[{ends.get(result.finish_reason, result.finish_reason)}: {count} tokens{rate}]"


def run(args: argparse.Namespace) -> int:
    """0 when every turn had its answer; 1 when one had none and nobody was there to see it."""
    model = engines.model_of(args)
    options = engines.options_of(args)
    more = template_args(args.template_args)
    progress = Progress(args.quiet)
    text = Text(model)
    if text.why_not:
        raise BadInput(f"a chat needs a tokenizer, but {text.why_not}")
    defaults = sampling_flags.defaults(args, model)
    with Checkpoint.open(model) as checkpoint:
        longest = checkpoint.config.max_position
    planned = -(-min(longest, KV_TOKENS) // KV_BLOCK) * KV_BLOCK
    options = {"max_running": 1, "kv_tokens": planned, "log": args.log} | options
    if args.engine == "jax":
        options |= {"progress": progress.say, "warn": progress.warn}
    talking = sys.stdin.isatty()
    with ExitStack() as stack:
        template = None if args.no_template else text.config.template
        renderer = template and stack.enter_context(Renderer(template, text.config.special))
        conversation = Conversation(text, renderer, args.system, more)
        if renderer is not None:
            conversation.prompt("?")  # what is wrong with a template shows before the engine opens
        engine = stack.enter_context(engines.open_engine(args.engine, model, options))
        if renderer is None:
            progress.say("no chat template: what you write is continued as plain text")
        eos = text.id_of("eos_token") if renderer else None
        chat = Chat(engine, conversation, text, min(longest, options["kv_tokens"]),
                    args.max_new_tokens, () if eos is None else (eos,), defaults, show,
                    progress.say if talking else lambda said: None)
        if talking:
            progress.say(COMMANDS)
        status = converse(chat, lines(talking), progress)
    engines.totals_of(engine)
    return 0 if talking else status


def converse(chat: Chat, asked: Iterator[str], progress: Progress) -> int:
    """Turn after turn until the input ends; 1 if one had no answer (CHAT-1, CHAT-3)."""
    status = 0
    with Pause() as pause:
        while True:
            with pause.off():
                said = next(asked, "/exit")
            if said in ("/exit", "/quit"):
                break
            if said == "/reset":
                chat.conversation.reset()
                progress.say("[forgotten]")
            elif said in ("/help", "/?"):
                progress.say(COMMANDS)
            elif said.startswith("/"):
                trouble(f"no command {said.split()[0]!r}; {COMMANDS}")
                status = 1
            elif said.strip() and not chat.turn(said, pause):
                status = 1
    return status


def lines(talking: bool) -> Iterator[str]:
    """What is typed, or piped, line by line, without the ends of lines."""
    if not talking:
        for line in sys.stdin.buffer:
            yield line.decode("utf-8", "replace").rstrip("\r\n")
        return
    try:
        import readline  # noqa: F401  arrow keys and earlier lines
    except ImportError:
        pass
    warned = False
    while True:
        try:
            said = input("> " if sys.stdout.isatty() else "")
            yield said.encode("utf-8", "replace").decode("utf-8")
            warned = False
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            print("\n(again to leave, or /exit)")


def show(piece: str) -> None:
    """A piece of an answer, at once. On a terminal, control characters are not obeyed."""
    if piece:
        if sys.stdout.isatty():
            piece = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
                            for c in piece)
        sys.stdout.write(piece)
        sys.stdout.flush()


def template_args(word: str) -> dict[str, Any]:
    """The object of --template-args. Raises BadInput."""
    value = strict_json.parse(word, "--template-args")
    if not isinstance(value, dict):
        raise BadInput(f"--template-args: an object is needed, not {strict_json.kind(value)}")
    for name in value:
        if name in RESERVED or not name.isidentifier():
            raise BadInput(f"--template-args: {strict_json.show(name)!r} cannot be given; "
                           f"{', '.join(RESERVED)} are taken")
    return value
