"""Request files: both forms, every field in and out of its bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from property_tests.refusals import one_line, refused
from reference.files.requests import (
    MAX_SEED,
    MAX_TOKENS,
    Request,
    check_ids,
    parse_requests,
    read_requests,
    write_requests,
)
from reference.vocab.errors import BadInput


def lines(*items: Any) -> bytes:
    return b"\n".join(json.dumps(item).encode() for item in items) + b"\n"


@pytest.mark.rule("FILE-11")
def test_both_forms_say_the_same(tmp_path: Path) -> None:
    items = [
        {"id": "a", "prompt": "Once", "max_new_tokens": 3, "arrival_s": 0.5, "temperature": 0.7,
         "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["\n\n", 2]},
        {"prompt": [1, 2, 3], "stop": "end"},
        {"id": "c", "prompt": "\U0001f600 é", "max_new_tokens": 0},
    ]  # fmt: skip
    expected = [
        Request("a", "Once", 3, 0.5, 0.7, 0.9, 5, 7, ("\n\n", 2)),
        Request("1", (1, 2, 3), stop=("end",)),
        Request("c", "\U0001f600 é", 0),
    ]
    assert parse_requests(lines(*items)) == expected
    assert parse_requests(b"\n  \r\n" + lines(*items).replace(b"\n", b"\r\n\r\n")) == expected
    for indent in (None, 0, 2):
        text = json.dumps({"requests": items}, indent=indent).encode()
        assert parse_requests(text) == expected
        assert parse_requests(b" \n\t" + text + b"\n\n") == expected
    path = tmp_path / "r.jsonl"
    write_requests(path, expected)
    assert read_requests(path) == expected


@pytest.mark.rule("FILE-12")
def test_a_requests_own_limit_beats_the_flag() -> None:
    assert Request("a", "x").resolve(9).max_new_tokens == 9
    assert Request("a", "x", 3).resolve(9).max_new_tokens == 3
    assert Request("a", "x", 0).resolve(9).max_new_tokens == 0


@pytest.mark.rule("FILE-13")
def test_ids_are_below_the_vocabulary() -> None:
    check_ids(Request("a", (0, 95), stop=(95, "x")), 96)
    check_ids(Request("a", "text"), 96)
    refused(lambda: check_ids(Request("a", (1, 2, 96)), 96), "'a'", "prompt[2] is 96", "0 to 95")
    refused(lambda: check_ids(Request("a", "x", stop=(96,)), 96), "stop id 96", "0 to 95")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ...}, "prompt is missing"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": None}, "prompt is null"),
    ({"prompt": 3}, "prompt is a number"),
    ({"prompt": {}}, "prompt is an object"),
    ({"prompt": [1, "a"]}, "prompt[1] is a"),
    ({"prompt": [True]}, "prompt[0] is True"),
    ({"prompt": [1.0]}, "prompt[0] is 1.0"),
    ({"prompt": [-1]}, "prompt[0] is -1"),
    ({"prompt": [1 << 31]}, "prompt[0] is 2147483648"),
    ({"prompt": [[1]]}, "prompt[0]"),
    ({"prompt": [1, None]}, "prompt[1] is None"),
    ({"id": ""}, "id is"),
    ({"id": 3}, "id is 3"),
    ({"id": None}, "id is None"),
    ({"id": "a\nb"}, "id is"),
    ({"id": "a\0"}, "id is"),
    ({"id": "x" * 257}, "id is"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"max_new_tokens": None}, "max_new_tokens is None"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
    ({"max_new_tokens": "2"}, "max_new_tokens is 2"),
    ({"max_new_tokens": MAX_TOKENS + 1}, "max_new_tokens"),
    ({"arrival_s": -0.1}, "arrival_s is -0.1"),
    ({"arrival_s": "0"}, "arrival_s"),
    ({"arrival_s": 1e10}, "arrival_s"),
    ({"arrival_s": False}, "arrival_s is False"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": None}, "temperature is None"),
    ({"temperature": 1001}, "temperature is 1001"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_p": 1.01}, "top_p is 1.01"),
    ({"top_p": [1]}, "top_p is [1]"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"top_k": 1 << 63}, "top_k"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": MAX_SEED + 1}, "seed is 18446744073709551616"),
    ({"seed": "1"}, "seed is 1"),
    ({"stop": 3}, "stop is 3"),
    ({"stop": None}, "stop is None"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", -2]}, "stop[1] is -2"),
    ({"stop": [True]}, "stop[0] is True"),
    ({"stop": ["a"] * 65}, "at most 64"),
    ({"stop": "a" * 4097}, "stop[0]"),
    ({"n": 2}, "unknown field 'n'"),
    ({"Prompt": "x"}, "unknown field 'Prompt'"),
    ({"\x1b": "x"}, "unknown field '\\x1b'"),
]


@pytest.mark.rule("FILE-11", "FILE-1")
@pytest.mark.parametrize(("change", "words"), BAD)
def test_a_bad_field_is_named_with_its_line(change: dict[str, Any], words: str) -> None:
    good = {"id": "a", "prompt": [1]}
    bad = {k: v for k, v in ({"id": "b", "prompt": "x"} | change).items() if v is not ...}
    refused(lambda: parse_requests(lines(good, bad), "r.jsonl"), "r.jsonl:2: ", words)
    document = json.dumps({"requests": [good, bad]}).encode()
    refused(lambda: parse_requests(document, "r.json"), "r.json: requests[1]: ", words)


@pytest.mark.rule("FILE-11", "FILE-1")
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no requests"),
        (b"\n \n", "no requests"),
        (b'{"requests": []}', "at least one"),
        (b'{"requests": {}}', "at least one"),
        (b'{"requests": [{"prompt": "x"}], "more": 1}', "unknown field 'more'"),
        (b'{"requests": [', "not JSON"),
        (b'{"requests": [{"prompt": "x"}]}\n{"prompt": "y"}', "not JSON"),
        (b'{"prompt": "x"}\n{"prompt": "y"', "r:2: not JSON"),
        (b'{"prompt": "x"}\n\n3', "r:3: an object is needed, not a number"),
        (b'[{"prompt": "x"}]', "r:1: an object is needed, not an array"),
        (b'{"prompt": "x", "prompt": "y"}', "twice"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": 1e400}', "too large"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "nested"),
        (b'{"id":"a","prompt":"x"}\n{"id":"a","prompt":"y"}', "r:2: the id 'a' is already at r:1"),
        (b'{"prompt":"x"}\n{"id":"0","prompt":"y"}', "the id '0' is already"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
    ],
)
def test_bad_files(data: bytes, words: str) -> None:
    refused(lambda: parse_requests(data, "r"), words)


@pytest.mark.rule("FILE-11")
def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    refused(lambda: read_requests(tmp_path / "none"), "none", "No such file")
    refused(lambda: read_requests(tmp_path), "directory")


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=9)


@pytest.mark.rule("FILE-11")
@given(
    st.lists(
        st.builds(
            Request,
            id=TEXT.filter(str.isprintable),
            prompt=TEXT | st.lists(st.integers(0, MAX_TOKENS), min_size=1).map(tuple),
            max_new_tokens=st.none() | st.integers(0, MAX_TOKENS),
            arrival_s=st.floats(0, 1e9),
            temperature=st.floats(0, 1000),
            top_p=st.floats(1e-300, 1),
            top_k=st.integers(0, MAX_TOKENS),
            seed=st.integers(0, MAX_SEED),
            stop=st.lists(TEXT | st.integers(0, MAX_TOKENS), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda r: r.id,
    )
)
def test_what_is_written_is_read(tmp_path: Path, requests: list[Request]) -> None:
    path = tmp_path / "r.jsonl"
    write_requests(path, requests)
    assert read_requests(path) == requests


@pytest.mark.rule("FILE-11", "FILE-1")
@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda t: ('{"prompt":' + t).encode()))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    try:
        assert parse_requests(data)
    except BadInput as e:
        one_line(e)
