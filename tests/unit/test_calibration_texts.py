"""Texts of a calibration: where they come from, which are chosen, what is refused."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lpxbuild.errors import HostError, SourceError
from lpxbuild.quantization.calibration import datasets
from lpxbuild.quantization.calibration.run import BATCH_TOKENS, batched, token_ids
from lpxbuild.recipe.schema import Calibration

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LINES = [f"The number {number} follows the number {number - 1}." for number in range(1, 9)]


def read(folder: Path, dataset: str, **settings: object) -> tuple[str, ...]:
    return datasets.read_texts(Calibration(dataset=dataset, **settings), base=folder, python=None).texts


def refused(folder: Path, dataset: str, **settings: object) -> str:
    """The message of the check and of the reading, which must say the same."""
    said = []
    for function in (datasets.check_dataset, datasets.read_texts):
        with pytest.raises((SourceError, HostError)) as error:
            function(Calibration(dataset=dataset, **settings), base=folder, python=None)
        said.append(str(error.value))
    assert said[0] == said[1]
    return said[0]


def test_the_bundled_texts(tmp_path):
    passages = datasets.builtin_passages()
    assert len(passages) == len(set(passages)) >= Calibration().samples
    assert sorted(read(tmp_path, "builtin", samples=1000)) == sorted(passages)
    lengths = [len(passage) for passage in passages]
    assert min(lengths) < 20
    assert max(lengths) > 1000
    for script in ("ß", "水", "の", "한", "ж", "ع", "ह", "def "):
        assert any(script in passage for passage in passages)
    licence = Path(datasets.__file__).with_name("builtin.LICENSE").read_text()
    assert "SPDX-License-Identifier: Apache-2.0 OR CC0-1.0" in licence


def test_a_text_file_gives_its_lines(tmp_path):
    (tmp_path / "mine.txt").write_text("\n".join(LINES) + "\n\n   \n")
    assert sorted(text.strip() for text in read(tmp_path, "mine.txt")) == sorted(LINES)
    assert sorted(text.strip() for text in read(Path("/"), str(tmp_path / "mine.txt"))) == sorted(LINES)


def test_json_lines_give_a_field(tmp_path):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": line, "prompt": "x"}) + "\n" for line in LINES))
    assert sorted(read(tmp_path, "mine.jsonl")) == sorted(LINES)
    assert read(tmp_path, "mine.jsonl", column="prompt", samples=2) == ("x", "x")


def test_the_seed_chooses(tmp_path):
    (tmp_path / "mine.txt").write_text("".join(f"{number}\n" for number in range(1000)))
    first = read(tmp_path, "mine.txt", samples=20)
    assert len(set(first)) == 20
    assert read(tmp_path, "mine.txt", samples=20) == first
    assert read(tmp_path, "mine.txt", samples=20, seed=1) != first


def test_every_text_has_the_same_chance():
    counts = Counter(text for seed in range(4000) for text in datasets.chosen("abcdefghij", 3, seed))
    # 4000 draws of 3 out of 10: 1200 each, with a standard deviation of 29.
    assert set(counts) == set("abcdefghij")
    assert all(1050 < count < 1350 for count in counts.values())


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_an_empty_file_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    message = refused(tmp_path, name)
    assert f"{name} has no text" in message
    assert "local .txt, .jsonl or .parquet file, or to builtin" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "fine"}\n{"text": ', ("line 2 is not JSON",)),
        ('{"prompt": "a", "answer": "b"}\n', ("line 1 has no text in the field 'text'", "prompt, answer", "column")),
        ('{"text": 7}\n', ("line 1 has no text in the field 'text'",)),
        ('["a"]\n', ("line 1 has no text", "a list")),
        ("[" * 100_000 + "\n", ("line 1 is not JSON",)),
    ],
)
def test_json_lines_that_are_none(tmp_path, content, words):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(SourceError) as error:
        read(tmp_path, "bad.jsonl")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("missing.txt", ("no such file", "missing.txt")),
        ("folder", ("folder is no file",)),
        ("table.csv", ("of no known kind", ".csv", ".txt, .jsonl, .parquet")),
        ("../up/and/away", ("no such file",)),
        ("latin.txt", ("cannot be read", "utf-8", "UTF-8")),
    ],
)
def test_files_that_are_none(tmp_path, dataset, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "latin.txt").write_bytes("Käse\n".encode("latin-1"))
    message = refused(tmp_path, dataset)
    assert all(word in message for word in words), message


def test_parquet_without_pyarrow(tmp_path):
    """The interpreter of the tests has none, as the base install."""
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    message = refused(tmp_path, "mine.parquet")
    assert "has no pyarrow" in message
    assert f"{sys.executable} -m pip install pyarrow" in message


def test_a_digest_stands_for_the_texts(tmp_path):
    (tmp_path / "mine.txt").write_text("a\n")
    assert datasets.digest("mine.txt", tmp_path) == hashlib.sha256(b"a\n").hexdigest()
    assert datasets.digest("org/name", tmp_path) == "hub:org/name"
    kind, _, digest = datasets.digest("builtin", tmp_path).partition(":")
    assert (kind, len(digest)) == ("builtin", 64)


@pytest.fixture
def tokenizer(tmp_path):
    """Every character is a token."""
    letters = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate("?abc ")}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.enable_truncation(7)  # what a tokenizer.json says about lengths is not for calibration
    letters.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_long_lines_are_cut(tokenizer):
    assert token_ids(tokenizer, ["ab" * 2500, "cab"], 512) == [[1, 2] * 256, [3, 1, 2]]


def test_a_long_line_is_read_to_its_end_where_its_beginning_gives_little(tokenizer):
    """Only the first 32 characters per wanted token are looked at; here they are no tokens at all."""
    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    words.pre_tokenizer = pre_tokenizers.Split("-", "removed")
    words.save(str(tokenizer / "tokenizer.json"))
    assert token_ids(tokenizer, ["-" * 1000 + "a-b-c"], 3) == [[1, 2, 3]]


def test_texts_without_tokens(tokenizer):
    with pytest.raises(SourceError, match="no tokens"):
        token_ids(tokenizer, ["", ""], 8)


def test_batches_of_about_one_length():
    lengths = (7, 100, 95, 90, 89, 50, 7, 1)
    found = batched([[length] * length for length in lengths])
    assert [[sequence[0] for sequence in batch] for batch in found] == [[100, 95, 90], [89], [50], [7, 7], [1]]
    assert [{len(sequence) for sequence in batch} for batch in found] == [{90}, {89}, {50}, {7}, {1}]
    assert [len(batch) for batch in batched([[0] * 512] * 9)] == [4, 4, 1]
    assert BATCH_TOKENS == 4 * 512


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server that speaks the hub's API: paths → answers of files; data sets it does not have are unknown."""
    from huggingface_hub import constants

    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/api/datasets/org/texts"):
                if path.endswith("convert/parquet"):
                    return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                siblings = [{"rfilename": name} for name in files]
                return self._send(200, json.dumps({"id": "org/texts", "sha": COMMIT, "siblings": siblings}).encode())
            name = path.rpartition("/")[2]
            if path.startswith(f"/datasets/org/texts/resolve/{COMMIT}/") and name in files:
                etag = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self._send(200, files[name], etag)
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield files
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_dataset_of_the_hub(hub, tmp_path):
    hub["README.md"] = b"about"
    hub["texts.py"] = b"raise SystemExit('code of a data set was run')"
    hub["data/test-0.jsonl"] = b'{"text": "of the test"}\n'
    hub["data/train-0.jsonl"] = b"".join(json.dumps({"text": line}).encode() + b"\n" for line in LINES[:3])
    hub["data/train-1.jsonl"] = b"".join(json.dumps({"text": line}).encode() + b"\n" for line in LINES[3:])
    hub.update({name.rpartition("/")[2]: data for name, data in hub.items()})
    found = datasets.read_texts(Calibration(dataset="org/texts"), base=tmp_path, python=None)
    assert set(found.texts) == set(LINES)
    assert found.revision == COMMIT
    assert read(tmp_path, "org/texts", split="test") == ("of the test",) * 2


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("org/other", ("org/other is not on the hub",)),
        ("org/texts", ("org/texts has no .parquet, .jsonl or .txt file of the split 'train'", "none of its code")),
    ],
)
def test_a_dataset_that_the_hub_cannot_give(hub, tmp_path, dataset, words):
    hub["texts.py"] = b"raise SystemExit('code of a data set was run')"
    message = refused(tmp_path, dataset)
    assert all(word in message for word in words), message
    assert "local .txt, .jsonl or .parquet file" in message


def test_a_hub_that_does_not_answer(monkeypatch, tmp_path):
    """A connection that is taken and never served, in a process of its own: nothing may keep it from ending."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        program = (
            "import sys; from pathlib import Path\n"
            "from lpxbuild.errors import HostError\n"
            "from lpxbuild.quantization.calibration import datasets, hub\n"
            "from lpxbuild.recipe.schema import Calibration\n"
            "hub.PATIENCE_SECONDS = 2.0\n"
            "try: datasets.check_dataset(Calibration(dataset='cnn_dailymail'), base=Path('.'), python=None)\n"
            "except HostError as error: print(error)\n"
        )
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
        # Two seconds of patience, and the start of Python and of the library beside everything else that runs here.
        assert time.monotonic() - started < 10
    assert "calibration dataset cnn_dailymail cannot be fetched" in done.stdout, done.stderr


@pytest.mark.parametrize("why", ["offline", "no network"])
def test_without_network(monkeypatch, tmp_path, why):
    if why == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    message = refused(tmp_path, "cnn_dailymail")
    assert time.monotonic() - started < 10
    assert "calibration dataset cnn_dailymail cannot be fetched" in message
    assert "local .txt, .jsonl or .parquet file" in message
    assert not list(tmp_path.iterdir())
