"""The safetensors header reader against the safetensors library, and against broken files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lpxbuild.errors import SourceError
from lpxbuild.source.header import HEADER_LIMIT, read_header

DOWNLOAD = "hf download org/name model.safetensors"


def written(path, header: dict | bytes, data: bytes = b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_entries_point_at_the_bytes(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.arange(4, dtype=np.int64), "c": np.float32(7)}
    arrays["c"] = np.array(7, dtype=np.float32)
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "x.safetensors", download=DOWNLOAD)
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert entries[name].shape == array.shape
        assert raw[entries[name].begin : entries[name].end] == array.tobytes()
    assert {name: found.dtype for name, found in entries.items()} == {"a": "I64", "b": "F16", "c": "F32"}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry([2], 0, 8)}, bytes(7), ["truncated", "a"]),
        ({"a": entry([2], 0, 8)}, bytes(9), ["1 bytes follow"]),
        ({"a": entry([2], 4, 12)}, bytes(12), ["begins at byte"]),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12), ["b begins at byte"]),
        ({"a": entry([3], 0, 8)}, bytes(8), ["needs 12 bytes", "give 8"]),
        ({"a": entry([2], 0, 8, "F99")}, bytes(8), ["unknown dtype 'F99'"]),
        ({"a": entry([2], 0, 8, ["F32"])}, bytes(8), ["unknown dtype ['F32']"]),
        ({"a": entry([-2], 0, 8)}, bytes(8), ["not a whole number"]),
        ({"a": entry([2.0], 0, 8)}, bytes(8), ["not a whole number"]),
        ({"a": entry([True], 0, 4)}, bytes(4), ["not a whole number"]),
        ({"a": {"dtype": "F32"}}, b"", ["lacks dtype, shape or data_offsets"]),
        ({"a": 3}, b"", ["lacks dtype, shape or data_offsets"]),
        (b"[1, 2]", b"", ["not a JSON object"]),
        (b"{", b"", ["not valid JSON"]),
        (b"[" * 100_000, b"", ["not valid JSON"]),
        (b'{"a":1,"a":2}', b"", ["a name occurs twice"]),
    ],
)
def test_broken_files_are_named(tmp_path, header, data, words):
    path = written(tmp_path / "broken.safetensors", header, data)
    with pytest.raises(SourceError) as refusal:
        read_header(path, download=DOWNLOAD)
    assert refusal.value.what.startswith("broken.safetensors")
    assert [word for word in words if word not in refusal.value.what] == []
    assert refusal.value.next == DOWNLOAD


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "truncated"),
        (b"\x10\x00", "truncated"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated"),
        ((HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}", "the format allows 100000000"),
        (b"<html>not found</html>", "the format allows"),
    ],
)
def test_length_is_checked_before_memory_is_taken(tmp_path, content, word):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=word):
        read_header(path, download=DOWNLOAD)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_never_another_error_and_never_more_lenient_than_the_library(tmp_path, data):
    save_file({"a": np.zeros((2, 3), np.float32), "bb": np.zeros(5, np.float16)}, tmp_path / "good.safetensors")
    raw = bytearray((tmp_path / "good.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(raw)
    try:
        mine = read_header(path, download=DOWNLOAD)
    except SourceError:
        return
    try:
        with safe_open(path, "numpy") as theirs:
            assert set(theirs.keys()) == mine.keys()
            assert {name: tuple(theirs.get_slice(name).get_shape()) for name in mine} == {
                name: found.shape for name, found in mine.items()
            }
    except SafetensorError as error:
        # The library also wants every name to be valid UTF-8 metadata; shapes and offsets were checked by both.
        pytest.fail(f"accepted what the library refuses: {error}")
