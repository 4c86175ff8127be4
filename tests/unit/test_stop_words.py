"""Stop words on text, and the ids and text of a generation cut by one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
from served_modules import CASES

from detokenizer import Vocabulary, decode  # isort: skip
from generation_text import GenerationText  # isort: skip
from stop_words import StopWords  # isort: skip

FOX = "the quick brown fox jumps"


def shown(words, text, size):
    """Pieces shown, and whether a word was found."""
    stop = StopWords(words)
    found = []
    for at in range(0, len(text), size):
        found.append(stop.feed(text[at : at + size]))
        if stop.found:
            return found, True
    return [*found, stop.flush()], False


def expected(words, text):
    """By hand: at the first character that completes a word, cut before the longest completed there."""
    for end in range(len(text) + 1):
        lengths = [len(word) for word in words if word and text[:end].endswith(word)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["wn f"], "the quick bro"),
        (["zzz", "fox"], "the quick brown "),
        ([""], FOX),
        ([], FOX),
        (["own fox", "n"], "the quick brow"),
        (["the"], ""),
        (["jumps over"], FOX),
    ],
)
def test_cut_before_the_word(words, text, size):
    found, stopped = shown(words, FOX, size)
    assert "".join(found) == text
    assert stopped == (text != FOX)


def test_a_possible_start_is_held_back_and_let_go():
    stop = StopWords(["stop"])
    assert stop.feed("a st") == "a "
    assert stop.feed("ep s") == "step "
    assert stop.flush() == "s"


@settings(deadline=None, max_examples=500)
@given(st.lists(st.text("ab", max_size=4), max_size=4), st.text("ab", max_size=20), st.integers(1, 5))
def test_pieces_do_not_matter(words, text, size):
    assert "".join(shown(words, text, size)[0]) == expected(words, text)


def stream(case, ids, words, size=1):
    vocabulary = Vocabulary.load(CASES / case)
    text = GenerationText(vocabulary, words)
    parts = []
    for at in range(0, len(ids), size):
        parts.append(text.feed(ids[at : at + size], [-float(i) for i in ids[at : at + size]]))
        if text.stopped:
            break
    parts.append(text.finish())
    return vocabulary, text, parts


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("case", ["stream_bytes", "stream_spaces"])
@pytest.mark.parametrize(
    ("words", "wanted"), [(["wn f"], "the quick bro"), (["zzz", "fox"], "the quick brown "), (["", ""], FOX)]
)
def test_generation_is_cut_in_text_and_ids(case, words, wanted, size):
    ids = Tokenizer.from_file(str(CASES / case / "tokenizer.json")).encode(FOX, add_special_tokens=False).ids
    vocabulary, text, parts = stream(case, ids, words, size)
    assert "".join(part.text for part in parts) == wanted
    kept = [index for part in parts for index in part.ids]
    assert kept == ids[: len(kept)]
    # The ids are the shortest prefix whose text covers what is shown.
    assert decode(vocabulary, kept).startswith(wanted)
    assert not decode(vocabulary, kept[:-1]).startswith(wanted)
    assert [p for part in parts for p in part.log_probs] == [-float(i) for i in kept]
    assert text.stopped == (wanted != FOX)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 340), max_size=30), st.lists(st.text("a eth", max_size=2), max_size=2))
def test_stream_of_any_ids_equals_the_whole(ids, words):
    results = []
    for size in (1, 4, 1000):
        vocabulary, _, parts = stream("stream_bytes", ids, words, size)
        results.append(("".join(p.text for p in parts), [i for p in parts for i in p.ids]))
    assert results[0] == results[1] == results[2]
    assert results[0][0] == expected(words, decode(vocabulary, ids))
    if not any(words):
        assert results[0][1] == ids


def test_ids_come_out_with_their_last_character():
    tokenizer = Tokenizer.from_file(str(CASES / "stream_bytes" / "tokenizer.json"))
    ids = tokenizer.encode("🙂a", add_special_tokens=False).ids
    _, _, parts = stream("stream_bytes", ids, [])
    assert [(p.text, len(p.ids)) for p in parts if p] == [("🙂", len(ids) - 1), ("a", 1)]


def test_a_long_word_takes_memory_of_its_length():
    import tracemalloc

    tracemalloc.start()
    try:
        stop = StopWords(["ab" * 10_000])
        assert stop.feed("cab" + "ab" * 100) == "c"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
