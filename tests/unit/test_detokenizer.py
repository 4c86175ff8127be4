"""Text from ids, one at a time: equal to the `tokenizers` library's decoding of the whole list."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
from served_modules import CASES

from detokenizer import BYTE_TOKEN, Detokenizer, DetokenizerError, Vocabulary, decode  # isort: skip

CASE_NAMES = ("stream_bytes", "stream_spaces")


@cache
def vocabulary(case: str) -> Vocabulary:
    return Vocabulary.load(CASES / case)


@cache
def library(case: str) -> Tokenizer:
    return Tokenizer.from_file(str(CASES / case / "tokenizer.json"))


def pieces(case: str, ids: list[int], size: int = 1, *, skip: bool = True) -> list[str]:
    """What a stream shows when the ids arrive `size` at a time."""
    detokenizer = Detokenizer(vocabulary(case), skip_special_tokens=skip)
    found = ["".join(detokenizer.feed(i) for i in ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*found, detokenizer.flush()]


CASE_TEXTS = [
    pytest.param(case, entry["ids"], entry["text"], id=f"{case}-{number}")
    for case in CASE_NAMES
    for number, entry in enumerate(json.loads((CASES / case / "case.json").read_text())["detok"])
]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("case", "ids", "text"), CASE_TEXTS)
def test_pieces_join_to_the_text_and_hold_whole_characters(case, ids, text, size):
    found = pieces(case, ids, size)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)
    assert library(case).decode(ids) == text


def test_cut_inside_a_character_ends_in_one_replacement():
    cut = json.loads((CASES / "stream_bytes" / "case.json").read_text())["detok_cut"]
    found = pieces("stream_bytes", cut["ids"])
    assert "".join(found) in cut["allowed"]
    assert "".join(found) == decode(vocabulary("stream_bytes"), cut["ids"])
    assert not any("\ufffd" in piece for piece in found[:-1])


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 340), max_size=40), st.booleans())
def test_byte_level_equals_the_library_for_any_ids(ids, skip):
    # Ids from 320 on are beyond the tokenizer: they add nothing.
    expected = library("stream_bytes").decode(ids, skip_special_tokens=skip)
    assert "".join(pieces("stream_bytes", ids, skip=skip)) == expected


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.one_of(st.integers(0, 340), st.text("é🙂世 a", min_size=1, max_size=2).map(lambda t: list(t.encode()))),
        max_size=30,
    ),
    st.booleans(),
)
def test_byte_fallback_equals_the_library_for_whole_characters(parts, skip):
    tokenizer = library("stream_spaces")
    ids: list[int] = []
    for part in parts:
        if isinstance(part, list):
            ids += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in part]
        elif not BYTE_TOKEN.match(tokenizer.id_to_token(part) or ""):
            ids.append(part)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces("stream_spaces", ids, skip=skip)) == expected


def test_invalid_byte_run_keeps_its_whole_characters():
    # The library writes one U+FFFD per byte of the run, 你 included; no stream could take 你 back.
    tokenizer = library("stream_spaces")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode() + b"\xf0\x9f"]
    assert "".join(pieces("stream_spaces", ids)) == "你\ufffd"


def test_special_tokens_are_shown_only_on_request():
    ids = [2, *library("stream_bytes").encode("a", add_special_tokens=False).ids, 3]
    assert decode(vocabulary("stream_bytes"), ids) == "a"
    assert decode(vocabulary("stream_bytes"), ids, skip_special_tokens=False) == "</s>a<|im_end|>"


def test_ids_beyond_the_tokenizer_are_empty():
    assert decode(vocabulary("stream_bytes"), [350, 100_000]) == ""


def test_metaspace_drops_the_first_space_only():
    description = {
        "model": {"vocab": {"▁the": 0, "▁fox": 1}},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    }
    assert decode(Vocabulary(description), [0, 1, 0]) == "the fox the"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_unknown_decoder_is_refused(decoder):
    with pytest.raises(DetokenizerError):
        Vocabulary({"model": {"vocab": {}}, "decoder": decoder})


@pytest.mark.parametrize("case", CASE_NAMES)
def test_text_spelt_byte_by_byte_reads_back(case):
    ids = vocabulary(case).byte_ids("né")
    assert ids is not None
    assert decode(vocabulary(case), ids) == "né"
