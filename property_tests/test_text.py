"""Tokens to text in pieces, stops, special tokens: TEXT-1 to TEXT-5, FILE-14, FILE-15."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_impl.app.answer import Answer
from jax_impl.app.detokenise import UNKNOWN, WINDOW_MAX, Detokeniser
from jax_impl.app.hold import Hold
from jax_impl.app.main import main
from jax_impl.app.text import Text
from property_tests import text_models as made
from property_tests.engines import checkpoint
from property_tests.refusals import refused
from property_tests.text_models import TOKENIZERS, begins, characters, model_with_text
from reference.files.routing_trace import read_trace

TEXT = st.text(st.sampled_from("the hil.é你\U0001f600\U0001f468‍\n a") | st.characters(
    exclude_categories=("Cs",)), max_size=14)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    """`Text` over each tokenizer, read from its file."""
    found = {}
    for name, make in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(name)
        make().save(str(folder / "tokenizer.json"))
        found[name] = Text(folder)
    return found


def streamed(text: Text, tokens: list[int]) -> list[str]:
    stream = text.stream()
    assert stream is not None
    return [*(stream.push(token) for token in tokens), stream.end()]


# Pieces


@pytest.mark.rule("TEXT-1")
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_together_are_the_whole(name: str, texts: dict[str, Text], data: Any) -> None:
    size = TOKENIZERS[name]().get_vocab_size()
    # A few ids beyond the vocabulary: models are padded, and may say such a thing.
    tokens = data.draw(st.lists(st.integers(0, size + 2), max_size=24))
    assert "".join(streamed(texts[name], tokens)) == texts[name].decode(tokens)


@pytest.mark.rule("TEXT-1")
@pytest.mark.parametrize("name", ["byte-fallback", "metaspace"])
@given(tokens=st.lists(st.sampled_from(
    [3 + b for b in (0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xFF, 0x41)] + [0, 259, 260, 263, 264]),
    max_size=14))
@example(tokens=[3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF])
@example(tokens=[259, 260])
def test_runs_of_byte_tokens(name: str, texts: dict[str, Text], tokens: list[int]) -> None:
    """One bad byte makes the whole run unreadable, so nothing of a run may be given out early."""
    assert "".join(streamed(texts[name], tokens)) == texts[name].decode(tokens)


@pytest.mark.rule("TEXT-1")
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace"])
@given(text=TEXT)
def test_no_piece_splits_a_character(name: str, texts: dict[str, Text], text: str) -> None:
    tokens = list(texts[name].encode(text, "x"))
    pieces = streamed(texts[name], tokens)
    assert "".join(pieces) == texts[name].decode(tokens)
    if UNKNOWN not in text:
        assert UNKNOWN not in "".join(pieces)
    if name == "byte-level" and not text.endswith(UNKNOWN):
        # Nothing is held back without need: with the last token everything is there.
        assert pieces[-1] == ""
        assert "".join(pieces) == text


@pytest.mark.rule("TEXT-1")
def test_an_emoji_comes_with_its_last_byte(texts: dict[str, Text]) -> None:
    text = texts["byte-level"]
    table = {text.decode([i]): i for i in range(256)}
    assert UNKNOWN in table
    single = made.byte_level().model
    ids = [single.token_to_id(c) for c in "ðŁĺĤ"]  # F0 9F 98 82 in the byte-level alphabet
    assert streamed(text, ids) == ["", "", "", "\U0001f602", ""]
    assert streamed(text, ids[:3]) == ["", "", "", UNKNOWN]
    assert streamed(text, [ids[0], *ids]) == ["", UNKNOWN, "", "", "\U0001f602", ""]


@pytest.mark.rule("TEXT-1")
def test_a_long_answer_is_not_decoded_over_and_over(texts: dict[str, Text]) -> None:
    text = texts["byte-level"]
    bad = made.byte_level().token_to_id("ÿ")  # byte FF: never a part of a character
    byte = {c: made.byte_level().token_to_id(c) for c in "ðŁĺĤa"}
    smiles = [byte[c] for c in "a" + "ðŁĺĤ" * 500]  # no token is a whole character
    for tokens in ([bad] * 2000, smiles, list(text.encode("the hill. " * 300, "x"))):
        stream, work = text.stream(), 0
        assert stream is not None
        decode = stream._decode

        def counted(window: list[int], decode: Any = decode) -> str:
            nonlocal work
            work += len(window)
            return decode(window)

        stream._decode = counted
        pieces = [*(stream.push(token) for token in tokens), stream.end()]
        assert "".join(pieces) == text.decode(tokens)
        assert work < 3 * WINDOW_MAX * len(tokens)
        assert max(map(len, pieces)) < 20


def test_a_decoder_that_looks_back_without_end_is_still_whole() -> None:
    """Nothing like it is known; the text of all tokens at once is what counts."""

    def decode(tokens: list[int]) -> str:
        return " ".join(str(token) for token in tokens) + (" odd" if len(tokens) % 2 else "")

    stream = Detokeniser(decode)
    for token in range(5):
        stream.push(token)
    stream.end()
    assert stream.text.startswith("0 odd")  # what was said cannot be taken back


# Stops


def stopped(text: str, stops: list[str]) -> tuple[str, str | None]:
    """(the text up to the stop, which stop), looking at every beginning of the text in turn."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.rule("TEXT-3")
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
@example(pieces=["a", "bc", "d"], stops=["abcd", "bc"])
@example(pieces=["aab", "aaba", "b"], stops=["aabab"])
def test_a_stop_is_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    text, stop = stopped("".join(pieces), stops)
    hold = Hold(stops)
    given_out = ""
    for n, piece in enumerate(pieces, start=1):
        given_out += hold.push(piece)
        assert text.startswith(given_out)
        if hold.met is None:
            held = "".join(pieces[:n])[len(given_out):]
            assert held == "" or any(s.startswith(held) and s != held for s in stops)
    assert given_out + hold.end() == text
    assert hold.met == stop


@pytest.mark.rule("TEXT-3")
def test_every_way_to_cut_a_text() -> None:
    text, stops = "xxSTOSTOPyy", ["STOP", "TOX", "yyy"]
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, piece = [], text[0]
        for character, cut in zip(text[1:], cuts, strict=True):
            if cut:
                pieces, piece = [*pieces, piece], ""
            piece += character
        hold = Hold(stops)
        out = "".join([*map(hold.push, [*pieces, piece]), hold.end()])
        assert (out, hold.met) == ("xxSTO", "STOP")


@pytest.mark.rule("TEXT-3")
def test_long_stops_are_cheap() -> None:
    stops = ["a" * 4000 + str(n) for n in range(8)]
    hold = Hold(stops)
    out = "".join(hold.push("a" * 10) for _ in range(1000)) + hold.push("3")
    assert (hold.met, len(out)) == (stops[3], 6000)


@pytest.mark.rule("TEXT-2", "TEXT-3", "TEXT-4")
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@given(text=TEXT, data=st.data())
def test_an_answer_ends_at_its_first_stop(
    name: str, texts: dict[str, Text], text: str, data: Any
) -> None:
    tokens = list(texts[name].encode(text, "x"))
    whole = texts[name].decode(tokens) or ""
    parts = [whole[i : i + n] for i in range(len(whole)) for n in range(1, 5)]
    stops = data.draw(st.lists(st.sampled_from(parts or ["x"]) | TEXT.filter(bool), max_size=3))
    answer = Answer(texts[name], stops)
    pieces = [answer.push(token) for token in tokens]
    pieces.append(answer.end())
    expected, stop = stopped(whole, stops)
    assert "".join(pieces) == answer.text == expected
    assert answer.stopped == (stop is not None)
    assert answer.tokens == tokens[: len(answer.tokens)]
    if stop is None:
        assert answer.tokens == tokens
    elif name == "byte-level":
        # The first token with which the text of the answer so far holds the stop.
        counts = [n for n in range(len(tokens) + 1)
                  if stop in (texts[name].decode(tokens[:n]) or "")]
        assert len(answer.tokens) == counts[0] or UNKNOWN in stop
    before = list(answer.tokens), answer.text
    assert answer.stopped is False or answer.push(tokens[0]) == ""
    assert answer.stopped is False or (answer.tokens, answer.text) == before


@pytest.mark.rule("TEXT-4")
def test_a_stop_id_ends_an_answer_with_its_text(texts: dict[str, Text]) -> None:
    text = texts["byte-level"]
    tokens = text.encode("a café hills", "x")
    answer = Answer(text, [tokens[1], "zzz"])
    said = "".join(map(answer.push, tokens)) + answer.end()
    assert (answer.tokens, answer.stopped) == (list(tokens[:2]), True)
    assert said == text.decode(tokens[:2])


@pytest.mark.rule("TEXT-2", "TEXT-4", "APP-12", "APP-8")
@pytest.mark.parametrize("engine", ["reference", "jax"])
def test_a_stop_over_several_tokens_ends_the_request(engine: str, tmp_path: Path) -> None:
    model = model_with_text(checkpoint(), tmp_path / "model")
    out, log, path = tmp_path / "out.json", tmp_path / "log", tmp_path / "f.jsonl"

    def rows(*asked: dict[str, Any]) -> list[dict[str, Any]]:
        path.write_text("".join(json.dumps({"id": str(n), "prompt": "covey"} | a) + "\n"
                                for n, a in enumerate(asked)))
        words = ["run", model, "--requests", path, "--engine", engine, "--ignore-eos", "--quiet",
                 "--max-new-tokens", 40, "--json", out, "--log", log, "--kv-tokens", 1024]
        assert main([str(word) for word in words]) == 0
        return json.loads(out.read_text())["requests"]

    (free,) = rows({"temperature": 1.5, "seed": 4})
    assert len(free["tokens"]) == 40
    stop = free["text"][9:12]
    at = free["text"].index(stop)
    cut, beside, never = rows(
        {"temperature": 1.5, "seed": 4, "stop": [free["text"][at + 1:at + 3] + "\n", stop]},
        {"temperature": 1.5, "seed": 4},
        {"temperature": 1.5, "seed": 4, "stop": free["text"][-2:] + "\n"})
    assert cut["text"] == free["text"][:at]
    assert (cut["finish_reason"], cut["error"]) == ("stop", None)
    assert cut["tokens"] == free["tokens"][: len(cut["tokens"])]
    special = sum(token < 3 for token in cut["tokens"])
    assert len(cut["tokens"]) - special == at + 3 == len(cut["text"]) + 3
    assert len(cut["token_s"]) == len(cut["tokens"])
    for row in (beside, never):
        assert (row["tokens"], row["text"]) == (free["tokens"], free["text"])
        assert row["finish_reason"] == "length"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    sampled = [e for e in events if e.get("event") == "Sampled" and e["request"] == 0]
    assert len(sampled) == len(cut["tokens"]), "nothing runs on while the stop is looked for"
    assert [e["stop"] for e in sampled] == [False] * (len(sampled) - 1) + [True]

    # The same requests, recorded: every token but the last of the same answers.
    words = ["trace", "record", model, "--requests", path, "--engine", engine, "--ignore-eos",
             "--quiet", "--max-new-tokens", 40, "-o", tmp_path / "t.npz", "--kv-tokens", 1024]
    assert main([str(word) for word in words]) == 0
    recorded = {r.id: len(r.topk) - r.prompt_len for r in read_trace(tmp_path / "t.npz").requests}
    assert recorded == {str(n): len(row["tokens"]) - 1
                        for n, row in enumerate([cut, beside, never])}


# Special tokens


@pytest.mark.rule("TEXT-5")
@pytest.mark.parametrize(
    ("adds", "config", "prompt", "expected"),
    [
        (True, None, "ab", "<s>ab"),
        (True, None, "<s>ab", "<s>ab"),
        (True, {"add_bos_token": None}, "ab", "<s>ab"),
        (True, {"add_bos_token": True}, "ab", "<s>ab"),
        (True, {"add_bos_token": True}, "<s>ab", "<s>ab"),
        (True, {"add_bos_token": False}, "ab", "ab"),
        (True, {"add_bos_token": False}, "<s>ab", "<s>ab"),
        (True, {"add_eos_token": True}, "ab", "<s>ab</s>"),
        (True, {"add_eos_token": True}, "ab</s>", "<s>ab</s>"),
        (True, {"add_eos_token": False}, "ab", "<s>ab"),
        (False, None, "ab", "ab"),
        (False, {"add_bos_token": True}, "ab", "<s>ab"),
        (False, {"add_bos_token": True}, "<s>ab", "<s>ab"),
        (False, {"add_bos_token": True}, "<s><s>ab", "<s><s>ab"),
        (False, {"add_bos_token": True, "add_eos_token": True}, "ab", "<s>ab</s>"),
        (False, {"add_bos_token": True, "bos_token": {"content": "</s>"}}, "ab", "</s>ab"),
        (False, {"add_bos_token": True, "bos_token": None}, "ab", "ab"),
        (False, {"add_bos_token": True, "bos_token": "<none>"}, "ab", "ab"),
    ],
)
def test_first_and_last_tokens(
    adds: bool, config: dict[str, Any] | None, prompt: str, expected: str, tmp_path: Path
) -> None:
    maker = begins(characters(), "<s>") if adds else characters()
    maker.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        config = {"bos_token": "<s>", "eos_token": "</s>"} | config
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = Text(tmp_path)
    plain = characters().encode(expected, add_special_tokens=False).ids
    assert text.encode(prompt, "x") == tuple(plain)
    rendered = characters().encode(prompt, add_special_tokens=False).ids
    assert text.encode_rendered(prompt, "x") == tuple(rendered)


@pytest.mark.rule("TEXT-5", "FILE-4")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "tokenizer_config.json: an object is needed"),
        ('{"add_bos_token": 1}', "add_bos_token is 1; true or false"),
        ('{"bos_token": 3}', "bos_token is 3; a string"),
        ('{"bos_token": {"content": []}}', "bos_token is []"),
        ('{"chat_template": 3}', "chat_template is 3; a string"),
        ('{"chat_template": [{"name": "rag", "template": ""}]}', "none of them named 'default'"),
        ('{"a": 1, "a": 2}', "twice"),
        ("{", "not JSON"),
    ],
)
def test_a_bad_configuration_is_named(config: str, words: str, tmp_path: Path) -> None:
    characters().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(config)
    refused(lambda: Text(tmp_path), "tokenizer_config.json", words)


@pytest.mark.rule("TEXT-5", "FILE-3", "FILE-4")
def test_text_files_lie_in_the_model_and_are_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    characters().save(str(tmp_path / "tokenizer.json"))
    (model / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    refused(lambda: Text(model), "tokenizer.json")
    (model / "tokenizer.json").unlink()
    characters().save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").mkdir()
    refused(lambda: Text(model), "chat_template.jinja")
    (model / "chat_template.jinja").rmdir()
    (model / "chat_template.jinja").write_bytes(b"\xff")
    refused(lambda: Text(model), "chat_template.jinja", "not UTF-8 (byte 0)")
