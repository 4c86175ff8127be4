"""Exact text through Triton: characters over several tokens, spaces, stop words, end ids. The ids are scripted."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_model

from lpxbuild.server import start
from lpxbuild.smoke.client import ENSEMBLE, TritonClient

CASES = Path(__file__).parents[1] / "cases" / "data"
# The prompt's last id picks the script; these letters have ids of their own in both tokenizers.
LETTERS = "abcdefgh"


def letter_ids(case: str) -> dict[str, int]:
    """Last id of the prompt "x a" for each letter, by the case's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CASES / case / "tokenizer.json"))
    ids = {letter: tokenizer.encode(f"x {letter}").ids[-1] for letter in LETTERS}
    assert len(set(ids.values())) == len(LETTERS)
    return ids


class Replay:
    """A served repository that answers the prompt "x a" with the first script, "x b" with the second …"""

    def __init__(self, server, scripts: list[list[int]]) -> None:
        self.client = TritonClient(server.http_url, server.grpc_url, idle=20)
        self.scripts = scripts

    def fields(self, number: int, **more):
        length = len(self.scripts[number])
        return {
            "text_input": f"x {LETTERS[number]}",
            "max_tokens": more.pop("max_tokens", length),
            "exclude_input_in_output": True,
            **more,
        }

    def pieces(self, number: int, **more) -> list[str]:
        fields = self.fields(number, stream=True, **more)
        with self.client.stream(ENSEMBLE, [fields]) as stream:
            return [text for response in stream for text in response.texts()]

    def whole(self, number: int, **more) -> str:
        return self.client.text(self.fields(number, **more))


@pytest.fixture
def replay(tmp_path, traces):
    """Serve scripts with the tokenizer of a case, and two postprocessing instances."""
    running = []

    def begin(case: str, scripts: list[list[int]]) -> Replay:
        source = tiny_model.make_source(tmp_path / "source", tokenizer=case)
        engine = tiny_model.build_engine(source, tmp_path / "built")
        repository = tiny_model.build_repository(engine, tmp_path / "repository", postprocessing_instances=2)
        ids = letter_ids(case)
        by_id = {ids[LETTERS[number]]: script for number, script in enumerate(scripts)}
        tiny_model.make_replay(repository, by_id, delay=0.002)
        server = start(repository, log_path=tmp_path / "triton.log")
        running.append(server)
        traces.prefixes.add(server.runtime.shm_prefix)
        return Replay(server, scripts)

    yield begin
    for server in running:
        server.stop()


@pytest.mark.parametrize("case", ["stream_bytes", "stream_spaces"])
def test_streams_are_exact(replay, case):
    """Three concurrent streams without request ids: nothing of one may reach another, no half character is sent."""
    expected = json.loads((CASES / case / "case.json").read_text())
    entries = expected["detok"]
    cut = expected.get("detok_cut")
    served = replay(case, [entry["ids"] for entry in entries] + ([cut["ids"]] if cut else []))
    for _ in range(3):
        with ThreadPoolExecutor(len(entries)) as pool:
            found = list(pool.map(served.pieces, range(len(entries)), timeout=60))
        for number, entry in enumerate(entries):
            assert "".join(found[number]) == entry["text"]
            assert not any("\ufffd" in piece for piece in found[number])
    for number, entry in enumerate(entries):
        assert served.whole(number) == entry["text"]
        events = served.client.pieces_over_http(served.fields(number))
        assert "".join(events) == entry["text"]
    if cut:
        # The generation ends inside a character: stream and plain answer agree on what is left of it.
        whole = served.whole(len(entries))
        assert whole in cut["allowed"]
        assert "".join(served.pieces(len(entries))) == whole


def test_stop_words_match_text_and_end_the_generation(replay):
    """Words that begin and end inside of tokens; empty ones are no words."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CASES / "stream_spaces" / "tokenizer.json"))
    text = "the quick brown fox jumps"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    served = replay("stream_spaces", [ids])
    assert served.whole(0) == text
    for words, wanted in ((["wn f"], "the quick bro"), (["zzz", "fox"], "the quick brown "), ([""], text)):
        assert served.whole(0, stop_words=words) == wanted
        assert "".join(served.pieces(0, stop_words=words)) == wanted
    assert served.whole(0, bad_words=[""]) == text
    # Ended, not only hidden: three times the script is asked for, and the server's count stays below one.
    fields = served.fields(0, stop_words=["wn f"], max_tokens=3 * len(ids), return_num_output_tokens=True)
    counts = [
        int(response.outputs["num_output_tokens"].reshape(-1)[0])
        for response in served.client.responses(ENSEMBLE, [fields])
    ]
    assert counts[-1] < len(ids)


def test_every_end_id_ends_the_text(replay):
    """generation_config has [2, 3]: 40 41 3 50 51 is two tokens of text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CASES / "eos_list" / "tokenizer.json"))
    served = replay("eos_list", [[40, 41, 3, 50, 51], [40, 41, 2, 50, 51]])
    for number in (0, 1):
        wanted = tokenizer.decode([40, 41])
        assert served.whole(number, max_tokens=50) == wanted
        assert "".join(served.pieces(number, max_tokens=50)) == wanted
