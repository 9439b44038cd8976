"""Chat templates: what they may do, what they may not, how their failures read."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from jax_impl.app.chat_template import Renderer
from jax_impl.app.tokenizer_config import ChatTemplate, tokenizer_config
from property_tests.refusals import one_line, refused
from reference.vocab.errors import BadInput

NAME = "m/chat_template.jinja"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LIMIT_S = 2.0
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 < 2 & é?"},
        {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}]  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    with Renderer(ChatTemplate(NAME, ""), SPECIAL, seconds=LIMIT_S, characters=100_000,
                  memory=256 << 20) as made:
        yield made


def rendered(renderer: Renderer, source: str, messages: Any = CHAT, **more: Any) -> str:
    renderer.template = ChatTemplate(NAME, source)
    return renderer.render(messages, **more)


# What templates do

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
ALTERNATING = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set messages = messages[1:] %}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate, not ' ~ message.role) }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{% else %}
{{ ' ' + message['content'] + eos_token }}
{% endif %}{% endfor %}"""
NAMESPACE = """{% set ns = namespace(last=-1) %}{% for m in messages %}
{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages[::-1] %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }};{% endfor %}
{{ ns.last }}{{ missing }}{{ messages[0].get('name', '-') }}"""


@pytest.mark.rule("TEXT-8")
def test_templates_as_they_are_found(renderer: Renderer) -> None:
    assert rendered(renderer, CHATML, CHAT[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 < 2 & é?<|im_end|>\n"
        "<|im_start|>assistant\n")
    assert rendered(renderer, CHATML, CHAT[1:2], enable_thinking=False).endswith(
        "assistant\n<think>\n\n</think>\n\n")
    assert "You help." in rendered(renderer, CHATML, CHAT[1:2])
    assert not rendered(renderer, CHATML, add_generation_prompt=False).endswith("assistant\n")
    assert rendered(renderer, ALTERNATING).replace("\n", "") == (
        "<s>[INST] 1 < 2 & é? [/INST] Yes.</s>[INST] So? [/INST]")
    assert rendered(renderer, NAMESPACE).replace("\n", "") == "user;assistant;3-"


@pytest.mark.rule("TEXT-8")
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[1].content | tojson }}", '"1 < 2 & é?"'),
        ("{{ {'b': [1], 'a': none} | tojson(indent=1) }}", '{\n "b": [\n  1\n ],\n "a": null\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
         '{"a":2,"b":1}'),
        ("a{% generation %}\n  {{ messages[2].content }}{% endgeneration %}\nb", "a  Yes.b"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}"
         "{% break %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ tools is none }} {{ documents is none }} {{ pad_token is defined }}",
         "True True False"),
        ("{{ eos_token }}{{ nothing }}", "</s>"),
        ("{{ lipsum is defined }} {{ range is defined }}", "False True"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(bos_token) }}", "<<s>>"),
        ("{% set x = namespace(n=0) %}{% for m in messages %}{% set x.n = x.n + 1 %}{% endfor %}"
         "{{ x.n }}", "4"),
        ("{{ messages | selectattr('role', 'eq', 'user') | list | length }}", "2"),
        ("{{ 'a b'.split(' ') | join('-') | upper }}", "A-B"),
        ("{# a comment #}{{ '%s: %d' % ('n', 3) }} {{ '{}'.format(4) }}", "n: 3 4"),
        ("text and a line\n", "text and a line"),
    ],
)
def test_what_templates_see(source: str, expected: str, renderer: Renderer) -> None:
    assert rendered(renderer, source) == expected


@pytest.mark.rule("TEXT-8")
def test_templates_may_ask_for_the_day(renderer: Renderer) -> None:
    before = datetime.datetime.now().strftime("%d %b %Y")
    said = rendered(renderer, "{{ strftime_now('%d %b %Y') }}")
    assert said in (before, datetime.datetime.now().strftime("%d %b %Y"))


# How failures read


@pytest.mark.rule("TEXT-9")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% if x %}\n\n{{ y }", "line 3: "),
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{% for x in y %}", "line 1: Unexpected end of template"),
        ("\n\n\n{% nothing %}", "line 4: Encountered unknown tag 'nothing'"),
        ("{{ 'a' | nothing }}", "line 1: No filter named 'nothing'."),
        ("\n{{ x.y.z }}", "line 2: 'x' is undefined"),
        ("\n\n{{ messages[9].role }}", "line 3: "),
        ("{{ 1 / 0 }}", "line 1: division by zero"),
        ("a\n{{ raise_exception('no\nsystem role') }}", "line 2: no system role"),
        ("{% macro f() %}\n{{ raise_exception('inside') }}{% endmacro %}\n\n{{ f() }}",
         "line 2: inside"),
        ("{{ raise_exception() }}", "line 1: "),
        ("{{ messages | tojson('x', 'y', 'z', 'a', 'b') }}", "line 1: "),
        ("{{ namespace | tojson }}", "line 1: "),
        ("{{ '\\ud800' }}", "it writes a lone surrogate"),
        ("{{ messages() }}", "line 1: 'list' object is not callable"),
        ("{% include 'config.json' %}", "line 1: no loader"),
        ("{% import '/etc/passwd' as x %}", "line 1: no loader"),
        ("{% extends '../a' %}", "line 1: no loader"),
    ],
)
def test_a_failure_names_the_template_and_the_line(
    source: str, said: str, renderer: Renderer
) -> None:
    refused(lambda: rendered(renderer, source), NAME, said)


@pytest.mark.rule("TEXT-9")
def test_a_failure_is_one_short_line(renderer: Renderer) -> None:
    with pytest.raises(BadInput) as caught:
        rendered(renderer, "{{ raise_exception('x\n\x1b[31m' * 2000) }}")
    one_line(caught.value)
    assert len(str(caught.value)) < 600


# What templates may not do

INTERNALS = "''.__class__.__mro__[1].__subclasses__()"
ESCAPES = [
    "{{ " + INTERNALS + " }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__')|attr('__mro__') }}",
    "{{ (''|attr)('__class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | groupby('__class__') | list }}",
    "{{ [''] | sum(attribute='__class__') }}",
    "{{ [['']] | sort(attribute='0.__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format(raise_exception) }}",
    "{{ '{x.__globals__}'.format_map({'x': raise_exception}) }}",
    "{{ ('{0.__class__}' | attr('format'))('') }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__}'] | map('format', '') | list }}",
    "{{ [''] | map('{0.__class__}'.format) | list }}",
    "{{ '%s' | format(strftime_now.__globals__) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'].sys.modules['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{% macro f() %}{{ caller.__globals__ }}{% endmacro %}{% call f() %}{% endcall %}",
    "{% macro f() %}{% endmacro %}{{ f._environment.globals }}",
    "{% macro f() %}{% endmacro %}{{ f._func.__code__ }}",
    "{{ loop.__init__ }}{% for x in [1] %}{{ loop._iterator.gi_frame }}{% endfor %}",
    "{% set g = (x for x in [1]) %}{{ g.gi_frame }}",
    "{{ (messages | map('list')).gi_frame.f_builtins }}",
    "{{ (messages | map('list')).gi_code }}",
    "{{ dict.fromkeys(['a']).__class__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ range.__class__.__base__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{{ messages.sort(key=strftime_now) }}",
    "{% set messages[0].role = 'x' %}",
    "{{ open('CANARY', 'w') }}",
    "{{ __import__('os').system('touch CANARY') }}",
    "{{ import('os') }}",
    "{{ eval('1') }}{{ exec('open(\"CANARY\", \"w\")') }}",
    "{% do __import__('os') %}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ lipsum(5) }}",
    "{{ config }}{{ request.application.__globals__ }}{{ environ }}",
    "{{ get_flashed_messages.__globals__ }}{{ url_for.__globals__ }}",
    "{% debug %}",
    "{% trans %}x{% endtrans %}",
]
"""Ways out of a template that are known from reports, and relations of them."""
INSIDE = ("<class", "object at 0x", "uid=", "/root", "environ(", "__builtins__", "<module",
          "<function", "<frame", "<code", "PATH")  # fmt: skip


@pytest.mark.rule("TEXT-6")
@pytest.mark.parametrize("source", ESCAPES)
def test_there_is_no_way_out(source: str, renderer: Renderer, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    before = json.dumps(CHAT)
    try:
        text = rendered(renderer, source.replace("CANARY", str(canary)))
    except BadInput as error:
        one_line(error)
        text = str(error).replace("<function str.format at 0x", "")  # what a filter was named
    assert not any(word in text for word in INSIDE), text
    assert not canary.exists()
    assert json.dumps(CHAT) == before
    # A template cannot leave anything behind for the next one either.
    assert rendered(renderer, "{{ messages[0].role }}") == "system"


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 7 ** (10 ** 9) }}",
    "{% set x = namespace(v=9) %}{% for i in range(60) %}{% set x.v = x.v * x.v %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{% set x = namespace(v='ab') %}{% for i in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}",
    "{% set x = namespace(v=[1]) %}{% for i in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%.10000000000f' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a\na' | indent(10 ** 10) }}",
    "{{ 'a'.replace('a', 'b' * 10 ** 9) * 99 }}",
    "{{ messages * 10 ** 9 }}",
    "{{ range(10 ** 12) | list }}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% for i in range(99999) %}{{ i }},{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ 1" + " + 1" * 30000 + " }}",
    "{% if 1 %}" * 5000,
    "{{ 'x' | wordwrap(1) | batch(1) | list }}{{ ('a ' * 10 ** 7) | urlize | length * 'a' }}",
    "{{ strftime_now('%c' * 10 ** 8) }}",
]


@pytest.mark.rule("TEXT-6")
@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_bombs_do_not_go_off(source: str, renderer: Renderer) -> None:
    began = time.monotonic()
    with pytest.raises(BadInput) as caught:
        rendered(renderer, source)
    assert time.monotonic() - began < LIMIT_S + 10  # the machine may be busy; never for ever
    one_line(caught.value)
    assert str(caught.value).startswith(NAME)


@pytest.mark.rule("TEXT-6")
def test_a_killed_process_is_gone_and_the_next_one_works(renderer: Renderer) -> None:
    assert rendered(renderer, "a") == "a"
    process = renderer._process
    assert process is not None
    assert rendered(renderer, "b") == "b"
    assert renderer._process is process
    with pytest.raises(BadInput, match=r"^m/chat_template.jinja: the template takes more than 2 s"):
        rendered(renderer, BOMBS[0])
    assert process.returncode == -9
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert rendered(renderer, "c") == "c"
    again = renderer._process
    assert again is not None
    again.kill()  # by somebody else
    again.wait()
    with pytest.raises(BadInput, match="ended its process by signal 9"):
        rendered(renderer, "d")
    assert rendered(renderer, "e") == "e"


@pytest.mark.rule("TEXT-6")
def test_limits_on_what_goes_in_and_out(renderer: Renderer) -> None:
    long = [{"role": "user", "content": "é" * 100_000}]
    assert rendered(renderer, "{{ messages[0].content }}", long) == "é" * 100_000
    refused(lambda: rendered(renderer, "{{ messages[0].content }}!", long),
            NAME, "more than 100000 characters of output")
    refused(lambda: rendered(renderer, "", [{"content": "x" * (17 << 20)}]), NAME, "at most")


@pytest.mark.rule("TEXT-6")
def test_the_process_has_no_files_and_no_environment(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "sings")
    renderer.close()
    assert rendered(renderer, "a") == "a"
    assert renderer._process is not None
    process = Path(f"/proc/{renderer._process.pid}")
    if not process.exists():
        pytest.skip("needs /proc")
    assert b"CANARY" not in (process / "environ").read_bytes()
    assert len(list((process / "fd").iterdir())) == 3
    limits = (process / "limits").read_text()
    assert "Max open files            3 " in limits
    assert f"Max address space         {256 << 20} " in limits


@pytest.mark.rule("TEXT-6")
def test_jinja2_is_there_and_not_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "jinja2"
    old.mkdir()
    (old / "__init__.py").write_text("__version__ = '3.1.5'\n")
    with Renderer(ChatTemplate(NAME, "x")) as renderer:
        renderer._path = [str(tmp_path)]
        refused(lambda: renderer.render([]), NAME, "jinja2 3.1.5 has known ways out")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(lambda: Renderer(ChatTemplate(NAME, "x")), NAME, "the package jinja2 is missing",
            "pip install '.[text]'")


# Where templates are found


@pytest.mark.rule("TEXT-7")
def test_where_the_template_is(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert tokenizer_config(tmp_path).template is None
    config.write_text(json.dumps({"chat_template": "one", "bos_token": {"content": "<s>"}}))
    found = tokenizer_config(tmp_path)
    assert found.template == ChatTemplate(f"{config}: chat_template", "one")
    assert found.special == {"bos_token": "<s>"}
    config.write_text(json.dumps({"chat_template": [
        {"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]}))
    assert tokenizer_config(tmp_path).template == ChatTemplate(
        f"{config}: chat_template 'default'", "three")
    (tmp_path / "chat_template.jinja").write_text("four\né", encoding="utf-8")
    assert tokenizer_config(tmp_path).template == ChatTemplate(
        str(tmp_path / "chat_template.jinja"), "four\né")
    (tmp_path / "chat_template.jinja").write_text("x" * ((1 << 20) + 1))
    refused(lambda: tokenizer_config(tmp_path), "chat_template.jinja")
