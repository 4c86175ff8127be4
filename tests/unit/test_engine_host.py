"""The engine host: its logic over a stand-in executor, and a real OpenVINO pipeline behind its socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
from served_modules import MODEL_REPO

import engine_protocol as protocol  # isort: skip
from engine_client import EngineClient, EngineError  # isort: skip
from engine_executor import Event, SequenceTokens  # isort: skip
from engine_host import EngineHost  # isort: skip
from engine_request import EngineLimits, RequestError, parse  # isort: skip
from tiny_engine import reference_logits, write_engine  # isort: skip

LIMITS = EngineLimits(
    max_batch_size=8, max_input_len=64, max_seq_len=96, max_beam_width=4, vocab_size=96, end_ids=(2, 3), pad_id=0
)
PROMPT = list(range(5, 25))


# --- what may be asked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"input_ids": [5] * 65}, ["65", "64"]),
        ({"input_ids": []}, ["no tokens"]),
        ({"input_ids": [5, 96]}, ["96", "0 to 95"]),
        ({"input_ids": [-1]}, ["-1"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"max_tokens": -1}, ["max_tokens is -1"]),
        ({"max_tokens": 1.5}, ["1.5"]),
        ({"max_tokens": "5"}, ["'5'"]),
        ({"beam_width": 5}, ["5", "4"]),
        ({"top_p": 1.5}, ["top_p"]),
        ({"top_k": -1}, ["top_k"]),
        ({"temperature": float("nan")}, ["temperature"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty"]),
        ({"num_return_sequences": 9}, ["9", "8"]),
    ],
)
def test_requests_beyond_the_limits_are_refused(message, words):
    with pytest.raises(RequestError) as caught:
        parse({"input_ids": PROMPT, "max_tokens": 4, **message}, LIMITS)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("length", "asked", "room"), [(60, 40, 36), (64, 10**9, 32), (64, 32, 32), (10, None, 86), (10, 7, 7)]
)
def test_max_tokens_is_cut_to_the_room(length, asked, room):
    assert parse({"input_ids": [5] * length, "max_tokens": asked}, LIMITS).max_tokens == room


@pytest.mark.parametrize(
    ("message", "sampling"),
    [
        ({}, False),
        ({"temperature": 0.7}, False),
        ({"top_k": 1, "top_p": 0.9}, False),
        ({"top_k": 50}, True),
        ({"top_p": 1.0}, True),
        ({"top_k": 50, "temperature": 0.0}, False),
    ],
)
def test_sampling_needs_top_k_or_top_p(message, sampling):
    assert parse({"input_ids": PROMPT, "max_tokens": 4, **message}, LIMITS).sampling is sampling


def test_end_ids_of_the_engine_unless_the_request_names_its_own():
    base = {"input_ids": PROMPT, "max_tokens": 4}
    assert parse(base, LIMITS).end_ids == {2, 3}
    assert parse({**base, "end_ids": []}, LIMITS).end_ids == set()
    assert parse({**base, "end_ids": [7], "stop_token_ids": [9]}, LIMITS).end_ids == {7, 9}


# --- frames, folders, locks -------------------------------------------------------------------------------------------


def test_frames_survive_any_cut():
    data = protocol.encode({"op": "a"}) + protocol.encode([{"op": "b"}, {"op": "c"}])
    decoder = protocol.FrameDecoder()
    found = [message["op"] for byte in data for message in decoder.feed(bytes([byte]))]
    assert found == ["a", "b", "c"]


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x02\x00\x00\x00{]",
        b"\x01\x00\x00\x003",
        pytest.param(len(DEEP).to_bytes(4, "little") + DEEP, id="deep"),
    ],
)
def test_broken_frames_are_refused(data):
    with pytest.raises(protocol.ProtocolError):
        protocol.FrameDecoder().feed(data)


def test_folder_is_private_and_long_paths_work(tmp_path):
    folder = protocol.private_directory(tmp_path / ("x" * 120) / "socket")
    assert folder.stat().st_mode & 0o777 == 0o700
    with protocol.listen(folder), protocol.connect(folder):
        pass


def test_the_folder_in_the_shared_temporary_one_is_ours(tmp_path, monkeypatch):
    monkeypatch.delenv(protocol.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(protocol.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = protocol.socket_directory(tmp_path / "engine")
    folder.parent.mkdir()
    folder.parent.chmod(0o777)  # its owner could put a socket of his own in place of ours
    assert protocol.private_directory(folder) == folder
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(protocol.ProtocolError, match="not a folder of this user"):
        protocol.private_directory(folder)


def test_a_folder_that_cannot_be_made_is_an_engine_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(protocol.DIRECTORY_VARIABLE, str(tmp_path / "file" / "socket"))
    with pytest.raises(EngineError, match="cannot be started in"):
        EngineClient(tmp_path / "engine").open()


def test_a_lock_whose_file_was_deleted_is_not_held(tmp_path):
    first, second = protocol.FileLock(tmp_path / "lock"), protocol.FileLock(tmp_path / "lock")
    assert first.acquire(wait=False)
    assert not second.acquire(wait=False)
    (tmp_path / "lock").unlink()
    assert second.acquire(wait=False)
    first.release()
    second.release()


# --- the host's own logic, over a stand-in executor -------------------------------------------------------------------


class ReplayExecutor:
    """Stand-in: every request replays a list of ids, one a step, with the end rules of a real executor."""

    def __init__(self, ids):
        self.ids = ids
        self.running = {}
        self.cancelled = set()
        self.fail = False

    @property
    def busy(self):
        return bool(self.running)

    def add(self, key, request):
        self.running[key] = (request, 0)

    def cancel(self, key):
        self.cancelled.add(key)

    def step(self):
        if self.fail:
            raise RuntimeError("replay broke")
        events = []
        for key, (request, done) in list(self.running.items()):
            if key in self.cancelled:
                events.append(Event(key, reason="cancelled"))
            elif done < len(self.ids) and self.ids[done] in request.end_ids:
                events.append(Event(key, reason="stop"))
            else:
                self.running[key] = (request, done + 1)
                over = done + 1 == request.max_tokens
                tokens = SequenceTokens(0, [self.ids[done % len(self.ids)]], [])
                events.append(Event(key, [tokens], "length" if over else None))
            if events[-1].reason:
                del self.running[key]
        time.sleep(0.002)
        return events

    def close(self):
        self.running.clear()


class Peer:
    """A raw client of the protocol."""

    def __init__(self, folder, *, role="stub", version=protocol.PROTOCOL):
        self.socket = protocol.connect(folder)
        self.socket.settimeout(20)
        self.decoder = protocol.FrameDecoder()
        self.waiting = []
        self.send({"op": "hello", "protocol": version, "role": role})

    def send(self, message):
        self.socket.sendall(protocol.encode(message))

    def receive(self):
        while not self.waiting:
            data = self.socket.recv(65536)
            if not data:
                return None
            self.waiting += self.decoder.feed(data)
        return self.waiting.pop(0)

    def until_end(self, identity):
        """Ids of sequence 0, and the last end message."""
        ids = []
        while True:
            message = self.receive()
            if message.get("id") != identity:
                continue
            if message["op"] == "end" and message.get("last"):
                return ids, message
            for sequence in message.get("sequences", ()):
                ids += sequence["ids"] if sequence["index"] == 0 else []

    def stats(self):
        self.send({"op": "stats"})
        while True:
            message = self.receive()
            if message["op"] == "stats":
                return message


@pytest.fixture
def replay(tmp_path):
    """A host in a thread, replaying 40 41 3 50 51; gives (folder, host, executor)."""
    executor = ReplayExecutor([40, 41, 3, 50, 51])
    host = EngineHost(executor, LIMITS, protocol.listen(tmp_path), executor_name="replay", linger=60)

    def serve():
        try:
            host.run()
        except RuntimeError:
            return

    thread = threading.Thread(target=serve)
    thread.start()
    yield tmp_path, host, executor
    host.stop()
    thread.join(10)
    host.close()


def add(identity=1, **fields):
    return {"op": "add", "id": identity, "input_ids": PROMPT, "max_tokens": 10, **fields}


def test_any_of_the_end_ids_ends_and_is_not_shown(replay):
    peer = Peer(replay[0])
    assert peer.receive()["end_ids"] == [2, 3]
    peer.send(add())
    assert peer.until_end(1) == ([40, 41], {"op": "end", "id": 1, "index": 0, "reason": "stop", "last": True})


@pytest.mark.parametrize(("asked", "ids", "reason"), [(2, [40, 41], "length"), (3, [40, 41], "stop")])
def test_reason_tells_length_from_stop(replay, asked, ids, reason):
    peer = Peer(replay[0])
    peer.send(add(max_tokens=asked))
    found, end = peer.until_end(1)
    assert (found, end["reason"]) == (ids, reason)


def test_cancel_frees_at_once_and_counts_are_exact(replay):
    peer = Peer(replay[0])
    for identity in (1, 2):
        peer.send(add(identity, end_ids=[], max_tokens=80))
    while peer.stats()["waiting"]:
        pass
    assert peer.stats()["active"] == 2
    peer.send({"op": "cancel", "id": 1})
    assert peer.until_end(1)[1]["reason"] == "cancelled"
    stats = peer.stats()
    assert (stats["active"], stats["requests_total"]) == (1, 2)
    assert stats["last_token_age_seconds"] < 5


def test_cancel_by_tag_reaches_other_clients(replay):
    peer, other = Peer(replay[0]), Peer(replay[0])
    peer.send(add(end_ids=[], max_tokens=80, tag="abc"))
    other.send({"op": "cancel", "tag": "abc"})
    peer.send(add(2))
    assert peer.until_end(1)[1]["reason"] == "cancelled"


def test_one_sequence_of_several_is_cancelled_alone(replay):
    peer = Peer(replay[0])
    peer.send([add(end_ids=[], max_tokens=30, num_return_sequences=3, top_k=5), {"op": "cancel", "id": 1, "index": 1}])
    reasons = {}
    while len(reasons) < 3:
        message = peer.receive()
        if message["op"] == "end":
            reasons[message["index"]] = message["reason"]
    assert reasons == {0: "length", 1: "cancelled", 2: "length"}


def test_a_client_that_hangs_up_leaves_nothing(replay):
    gone, peer = Peer(replay[0]), Peer(replay[0])
    gone.send(add(end_ids=[], max_tokens=80))
    while peer.stats()["active"] != 1:
        pass
    gone.socket.close()
    deadline = time.monotonic() + 5
    while replay[2].running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not replay[2].running
    assert peer.stats()["active"] == 0


def test_refused_request_leaves_the_others_alone(replay):
    peer = Peer(replay[0])
    peer.send([add(1, input_ids=[5] * 65), add(2), add(3, end_ids=["x"]), add(4, max_tokens=float("inf"))])
    ids, end = peer.until_end(1)
    assert (ids, end["reason"]) == ([], "error")
    assert end["message"] == "prompt has 65 tokens, max_input_len is 64"
    assert [peer.until_end(n)[1]["reason"] for n in (3, 4)] == ["error", "error"]
    assert peer.until_end(2)[0] == [40, 41]


def test_other_protocol_version_is_refused(replay):
    peer = Peer(replay[0], version=99)
    assert peer.receive()["op"] == "hello"
    error = peer.receive()
    assert error["op"] == "error"
    assert "99" in error["message"]
    assert peer.receive() is None


def test_an_engine_that_breaks_answers_every_open_request(replay):
    peer = Peer(replay[0])
    peer.send([add(1, end_ids=[], max_tokens=80), add(2, end_ids=[], max_tokens=80)])
    while peer.stats()["active"] != 2:
        pass
    replay[2].fail = True
    for identity in (1, 2):
        end = peer.until_end(identity)[1]
        assert (end["reason"], end["message"]) == ("error", "the engine failed: replay broke")


# --- a real engine ----------------------------------------------------------------------------------------------------


class Collected:
    """Handler that gathers one request's answer."""

    def __init__(self):
        self.ids = {}
        self.log_probs = {}
        self.end = None
        self.done = threading.Event()

    def __call__(self, message):
        for sequence in message.get("sequences", ()):
            self.ids.setdefault(sequence["index"], []).extend(sequence["ids"])
            self.log_probs.setdefault(sequence["index"], []).extend(sequence.get("log_probs", ()))
        if message.get("last"):
            self.end = message
            self.done.set()


def ask(client, **fields):
    collected = Collected()
    collected.identity = client.add({"input_ids": PROMPT, "max_tokens": 12, "end_ids": [], **fields}, collected)
    return collected


def result(collected):
    assert collected.done.wait(60)
    return collected


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return write_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def client(engine, tmp_path_factory):
    """A stub's client that started its own host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(protocol.DIRECTORY_VARIABLE, str(tmp_path_factory.mktemp("socket")))
        client = EngineClient(engine, python=sys.executable)
        client.open()
        yield client
        pid = client._process.pid
        os.kill(pid, signal.SIGTERM)
        client._process.wait(20)
        client.close()


def log_softmax(logits):
    import numpy as np

    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("fields", [{}, {"top_p": 1.0, "seed": 5, "temperature": 1.3}])
def test_log_probabilities_are_the_log_softmax_of_the_graph(client, fields):
    answer = result(ask(client, log_probs=True, **fields))
    ids = answer.ids[0]
    expected = log_softmax(reference_logits(PROMPT + ids))[len(PROMPT) - 1 :]
    assert len(ids) == 12
    assert answer.log_probs[0] == pytest.approx([expected[i, token] for i, token in enumerate(ids)], abs=1e-3)
    if not fields:
        assert ids == [int(row.argmax()) for row in expected[:12]]


def test_same_seed_same_output_whatever_else_runs(client):
    fields = {"top_p": 0.95, "top_k": 40}
    alone = result(ask(client, seed=11, **fields)).ids
    crowd = [ask(client, seed=seed, **fields) for seed in (1, 11, 2, 11, 3)]
    found = [result(answer).ids for answer in crowd]
    assert found[1] == found[3] == alone
    assert found[0] != found[2]


def test_repetition_penalty_follows_the_formula(client):
    import numpy as np

    ids = []
    for _ in range(6):
        logits = reference_logits(PROMPT + ids)[-1].astype(np.float64)
        seen = list(set(PROMPT + ids))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 3.0, logits[seen] * 3.0)
        ids.append(int(logits.argmax()))
    assert result(ask(client, repetition_penalty=3.0, max_tokens=6)).ids[0] == ids


def test_min_tokens_bans_every_end_id(client):
    free = result(ask(client, top_p=1.0, seed=3)).ids[0]
    ends = sorted({free[1], free[4]})
    stopped = result(ask(client, top_p=1.0, seed=3, end_ids=ends))
    assert stopped.ids.get(0, []) == free[: min(free.index(end) for end in ends)]
    assert stopped.end["reason"] == "stop"
    later = result(ask(client, top_p=1.0, seed=3, end_ids=ends, min_tokens=8)).ids[0]
    assert len(later) >= 8
    assert not set(ends) & set(later)


def test_beams_best_first_and_scores_add_up(client):
    answer = result(ask(client, beam_width=3, num_return_sequences=3, max_tokens=5, log_probs=True))
    totals = [sum(answer.log_probs[index]) for index in range(3)]
    assert totals == sorted(totals, reverse=True)
    for index, ids in answer.ids.items():
        expected = log_softmax(reference_logits(PROMPT + ids))[len(PROMPT) - 1 :]
        assert answer.log_probs[index] == pytest.approx([expected[i, t] for i, t in enumerate(ids)], abs=1e-3)


def test_sampled_sequences_are_the_runs_of_following_seeds(client):
    several = result(ask(client, top_p=1.0, seed=20, num_return_sequences=3)).ids
    assert several == {i: result(ask(client, top_p=1.0, seed=20 + i)).ids[0] for i in range(3)}


def test_library_refusals_reach_the_client(client):
    answer = result(ask(client, presence_penalty=5.0))
    assert answer.end["reason"] == "error"
    assert "presence_penalty" in answer.end["message"]
    assert ".cpp" not in answer.end["message"]


def test_cancelled_request_gives_its_memory_back(client):
    answer = ask(client, max_tokens=70)
    client.cancel(answer.identity)
    assert result(answer).end["reason"] in ("cancelled", "length")
    with_probe = Peer(client.directory, role="probe")
    assert with_probe.stats()["active"] == 0
    with_probe.socket.close()


def test_a_second_host_leaves_the_first_alone(client, engine):
    command = [sys.executable, str(MODEL_REPO / "tensorrt_llm" / "engine_host.py"), "--engine", str(engine)]
    done = subprocess.run(
        [*command, "--socket-dir", str(client.directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "another engine host" in done.stderr
    assert len(result(ask(client)).ids[0]) == 12


def test_killed_host_ends_requests_with_an_error_and_is_started_again(client):
    answer = ask(client, max_tokens=70)
    os.kill(client._process.pid, signal.SIGKILL)
    end = result(answer).end
    if end["reason"] == "error":  # the tiny engine may have been faster than the signal
        assert "engine host" in end["message"]
        assert str(client.directory) in end["message"]
    client._process.wait(10)
    deadline = time.monotonic() + 10
    while client._socket is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(result(ask(client)).ids[0]) == 12


def test_host_ends_after_its_last_stub_and_removes_its_folder(engine, tmp_path, monkeypatch):
    monkeypatch.delenv(protocol.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(protocol, "socket_directory", lambda _: tmp_path / "own")
    client = EngineClient(engine, python=sys.executable)
    monkeypatch.setattr(EngineClient, "_LINGER", "0.2")
    client.open()
    process = client._process
    client.close()
    assert process.wait(30) == 0
    assert not (tmp_path / "own").exists()


def test_engine_that_cannot_load_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv(protocol.DIRECTORY_VARIABLE, str(tmp_path / "socket"))
    broken = write_engine(tmp_path / "engine")
    (broken / "openvino_model.bin").write_bytes(b"")
    with pytest.raises(EngineError) as caught:
        EngineClient(broken, python=sys.executable).open()
    assert "exit code 1" in str(caught.value)
    assert "engine_host.log" in str(caught.value)


def test_a_dead_hosts_socket_file_is_no_obstacle(tmp_path):
    with protocol.listen(tmp_path):
        pass  # closed without unlinking, as by SIGKILL
    assert (tmp_path / protocol.SOCKET_NAME).exists()
    with pytest.raises(ConnectionRefusedError):
        protocol.connect(tmp_path)
    with protocol.listen(tmp_path) as server, protocol.connect(tmp_path):
        assert isinstance(server, socket.socket)
