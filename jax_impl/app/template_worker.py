"""Renders chat templates, in a process of its own that others may kill (TEXT-6, TEXT-8).

Run as a file, never imported by the command: it reads one JSON object a line from standard input
and answers each with one on standard output. The first line says where jinja2 is and how much
memory may be used; a template is code from a stranger.

    {"path": [...], "memory": bytes}                                 -> {"ready"}
    {"name", "source", "context": {...}, "characters": n, "cpu": s}  -> {"text"} or {"error"}
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from types import TracebackType
from typing import Any

VERSION = (3, 1, 6)
"""The first jinja2 without a known way out of its sandbox."""
ERROR_MAX = 300
WARM_UP = """{% for m in messages %}{{ m['a\\n'] | tojson }}{% endfor %}
{{ strftime_now('%d %b %Y') ~ [1, 'é'] | join }}{{ raise_exception('x') }}"""
"""Rendered first, for what Python loads only when it is used: afterwards no file can be opened."""


def environment() -> Any:
    """The sandbox, with what transformers offers to templates and no more."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model says; here it is only kept."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)  # fmt: skip

    def raise_exception(message: Any = "") -> None:
        raise jinja2.TemplateError(str(message))

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.globals.pop("lipsum")
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    made.filters["tojson"] = to_json
    return made


def render(made: Any, asked: dict[str, Any]) -> str:
    """The text of one template. Raises whatever the template does, and OverflowError."""
    code = made.compile(asked["source"], name=asked["name"], filename=asked["name"])
    template = made.template_class.from_code(made, code, made.make_globals(None))
    pieces, length = [], 0
    for piece in template.generate(**asked["context"]):
        length += len(piece)
        if length > asked["characters"]:
            raise OverflowError(f"more than {asked['characters']} characters of output")
        pieces.append(piece)
    return "".join(pieces)


def line_in(name: str, error: BaseException) -> int | None:
    """The line of the template at which the error came up."""
    line: int | None = getattr(error, "lineno", None)  # of a syntax error
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def answer(made: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The reply to one line."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + 1 + asked["cpu"], resource.RLIM_INFINITY))
    try:
        return {"text": render(made, asked)}
    except MemoryError:
        return {"error": "it takes too much memory", "line": None}
    except RecursionError:
        return {"error": "it is nested too deeply", "line": None}
    except Exception as error:
        said = " ".join(str(error).split())[:ERROR_MAX] or type(error).__name__
        return {"error": said, "line": line_in(asked["name"], error)}


def main() -> None:
    """Answers until standard input ends."""
    first = json.loads(sys.stdin.buffer.readline())
    sys.path[:0] = first["path"]
    import jinja2

    told = tuple(int(n) for n in jinja2.__version__.split(".")[:3] if n.isdigit())
    if told < VERSION:
        say({"ready": False, "version": jinja2.__version__})
        return
    made = environment()
    answer(made, {"name": "", "source": WARM_UP, "context": {"messages": [{}]}, "characters": 99,
                  "cpu": 60})
    for kind, most in (
        (resource.RLIMIT_AS, first["memory"]), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 3),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))
    say({"ready": True})
    for line in iter(sys.stdin.buffer.readline, b""):
        say(answer(made, json.loads(line)))


def say(reply: dict[str, Any]) -> None:
    """One line on standard output."""
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
