"""The process that owns the engine: one loop that serves a unix socket between two forward passes.

    python engine_host.py --engine FOLDER --socket-dir FOLDER [--log FILE] [--linger SECONDS] [--keep]

It runs apart from Triton's stubs because a forward pass of OpenVINO holds the interpreter lock, and because several
stubs share one batch. Messages: engine_protocol.py. It ends when the last stub has gone for `--linger` seconds, or on
SIGTERM; with `--keep` only on SIGTERM. SIGINT is ignored: Ctrl-C reaches the whole process group, and Triton still
drains its requests then. Exit codes: 0 ended as told (or another host serves this folder), 1 the engine failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import engine_protocol as protocol
from engine_executor import Event, Executor, load_description, load_executor
from engine_request import REASON_ERROR, EngineLimits, RequestError, parse

MAX_UNSENT = 256 << 20  # a client that reads nothing for this long is cut off


@dataclass
class _Open:
    """A request of a client: the sequences that are still running."""

    sequences: set[int]
    tag: str = ""
    has_token: bool = False


@dataclass(eq=False)
class _Client:
    connection: socket.socket
    decoder: protocol.FrameDecoder = field(default_factory=protocol.FrameDecoder)
    role: str = ""
    requests: dict[int, _Open] = field(default_factory=dict)
    outgoing: list[protocol.Message] = field(default_factory=list)
    unsent: bytearray = field(default_factory=bytearray)


def _error_end(identity: int, text: str) -> protocol.Message:
    return {"op": "end", "id": identity, "reason": REASON_ERROR, "message": text, "last": True}


class EngineHost:
    """Sockets and bookkeeping around an executor; keys of the executor are (client, request id, sequence)."""

    def __init__(
        self,
        executor: Executor,
        limits: EngineLimits,
        server: socket.socket,
        *,
        executor_name: str,
        linger: float = 5.0,
        keep: bool = False,
    ) -> None:
        self.executor = executor
        self.limits = limits
        self.executor_name = executor_name
        self.linger = linger
        self.keep = keep
        self.stopping = False
        self._server = server
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, None)
        # Python restarts an interrupted select, so a signal has to arrive as something to read.
        self._signal_reader, signal_writer = socket.socketpair()
        self._signal_writer = signal_writer
        for end in (self._signal_reader, signal_writer):
            end.setblocking(False)
        self._selector.register(self._signal_reader, selectors.EVENT_READ, "signal")
        self._alone_since = time.monotonic()
        self._tokens_total = 0
        self._requests_total = 0
        self._last_token: float | None = None

    def stop(self) -> None:
        """End `run`; may be called from a signal handler."""
        self.stopping = True
        with contextlib.suppress(OSError):
            self._signal_writer.send(b"!")

    def run(self) -> None:
        """Serve until told to stop, or until the last stub has been gone for `linger` seconds."""
        while not self.stopping:
            for key, mask in self._selector.select(self._timeout()):
                if key.fileobj is self._server:
                    self._accept()
                elif isinstance(key.data, _Client):
                    if mask & selectors.EVENT_READ:
                        self._receive(key.data)
                    if mask & selectors.EVENT_WRITE and key.data in self._clients:
                        self._flush(key.data)
            try:
                events = self.executor.step()
            except Exception as error:
                self._fail(error)
                raise
            self._report(events)
            if self._forsaken():
                return

    def _timeout(self) -> float | None:
        if self.executor.busy:
            return 0.0
        if self.keep or self._stubs():
            return None
        return max(0.0, self._alone_since + self.linger - time.monotonic())

    def _stubs(self) -> bool:
        return any(client.role == "stub" for client in self._clients)

    def _forsaken(self) -> bool:
        return not self.keep and not self._stubs() and time.monotonic() - self._alone_since >= self.linger

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            client = _Client(connection)
            self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        try:
            for message in client.decoder.feed(data):
                self._handle(client, message)
        except protocol.ProtocolError as error:
            client.outgoing.append({"op": "error", "message": str(error)})
            self._flush(client)
            self._drop(client)
            return
        self._flush(client)

    def _handle(self, client: _Client, message: protocol.Message) -> None:
        if not client.role:
            client.outgoing.append(self._hello())
            client.role = str(protocol.check_hello(message).get("role", "probe"))
            return
        operation, identity = message.get("op"), message.get("id")
        if operation == "stats":
            client.outgoing.append(self._stats())
        elif operation == "cancel" and isinstance(message.get("tag"), str):
            self._cancel_tagged(message["tag"])
        elif not isinstance(identity, int):
            raise protocol.ProtocolError(f"{operation!r} needs an integer id, not {identity!r}")
        elif operation == "add":
            self._add(client, identity, message)
        elif operation == "cancel":
            opened = client.requests.get(identity)
            wanted = message.get("index")
            for index in sorted(opened.sequences) if opened else ():
                if wanted is None or wanted == index:
                    self.executor.cancel((client, identity, index))
        else:
            raise protocol.ProtocolError(f"unknown operation {operation!r}")

    def _cancel_tagged(self, tag: str) -> None:
        """The client's own request id, whichever stub it went through."""
        for client in self._clients:
            for identity, opened in client.requests.items():
                if tag and opened.tag == tag:
                    for index in opened.sequences:
                        self.executor.cancel((client, identity, index))

    def _hello(self) -> protocol.Message:
        limits = self.limits
        return {
            "op": "hello",
            "protocol": protocol.PROTOCOL,
            "executor": self.executor_name,
            "pid": os.getpid(),
            "vocab_size": limits.vocab_size,
            "end_ids": list(limits.end_ids),
            "pad_id": limits.pad_id,
            "limits": {
                "max_batch_size": limits.max_batch_size,
                "max_input_len": limits.max_input_len,
                "max_seq_len": limits.max_seq_len,
                "max_beam_width": limits.max_beam_width,
            },
        }

    def _stats(self) -> protocol.Message:
        open_requests = [r for client in self._clients for r in client.requests.values()]
        age = None if self._last_token is None else time.monotonic() - self._last_token
        return {
            "op": "stats",
            "active": len(open_requests),
            "waiting": sum(not r.has_token for r in open_requests),
            "tokens_total": self._tokens_total,
            "requests_total": self._requests_total,
            "last_token_age_seconds": age,
        }

    def _add(self, client: _Client, identity: int, message: protocol.Message) -> None:
        if identity in client.requests:
            raise protocol.ProtocolError(f"request id {identity} is still running")
        self._requests_total += 1
        opened = _Open(set(), str(message.get("tag") or ""))
        client.requests[identity] = opened
        try:
            request = parse(message, self.limits)
            # A beam search is one job with several results; sampled sequences are jobs of their own.
            count = request.num_return_sequences if request.beam_width == 1 else 1
            for index in range(count):
                self.executor.add((client, identity, index), request.sequence(index) if count > 1 else request)
                opened.sequences.add(index)
        except (RequestError, TypeError, ValueError, OverflowError) as error:
            for index in opened.sequences:
                self.executor.cancel((client, identity, index))
            del client.requests[identity]
            client.outgoing.append(_error_end(identity, str(error)))

    def _report(self, events: list[Event]) -> None:
        touched: set[_Client] = set()
        for event in events:
            client, identity, index = event.key  # type: ignore[misc]
            opened = client.requests.get(identity)
            if opened is None or client not in self._clients:
                continue
            touched.add(client)
            if event.sequences:
                opened.has_token = True
                self._last_token = time.monotonic()
                sequences = []
                for sequence in event.sequences:
                    self._tokens_total += len(sequence.ids)
                    entry: dict[str, Any] = {"index": sequence.index + index, "ids": sequence.ids}
                    if sequence.log_probs:
                        entry["log_probs"] = sequence.log_probs
                    sequences.append(entry)
                client.outgoing.append({"op": "tokens", "id": identity, "sequences": sequences})
            if event.reason is not None:
                opened.sequences.discard(index)
                end: protocol.Message = {"op": "end", "id": identity, "index": index, "reason": event.reason}
                if event.message:
                    end["message"] = event.message
                if not opened.sequences:
                    end["last"] = True
                    del client.requests[identity]
                client.outgoing.append(end)
        for client in touched:
            self._flush(client)

    def _flush(self, client: _Client) -> None:
        if client.outgoing:
            batch = client.outgoing
            client.unsent += protocol.encode(batch[0] if len(batch) == 1 else batch)
            client.outgoing = []
        try:
            while client.unsent:
                sent = client.connection.send(client.unsent)
                del client.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if len(client.unsent) > MAX_UNSENT:
            self._drop(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.connection).events != wanted:
            self._selector.modify(client.connection, wanted, client)

    def _drop(self, client: _Client) -> None:
        """The client has gone: nobody wants its requests any more."""
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        for identity, opened in client.requests.items():
            for index in opened.sequences:
                self.executor.cancel((client, identity, index))
        if client.role == "stub" and not self._stubs():
            self._alone_since = time.monotonic()

    def _fail(self, error: Exception) -> None:
        """The engine broke: every open request gets an error before the host goes."""
        for client in list(self._clients):
            for identity in client.requests:
                client.outgoing.append(_error_end(identity, f"the engine failed: {error}"))
            client.requests.clear()
            client.connection.settimeout(1.0)
            self._flush(client)

    def close(self) -> None:
        """Requests that are still open end with an error; the executor gives its memory back."""
        for client in list(self._clients):
            for identity in client.requests:
                client.outgoing.append(_error_end(identity, "the engine host was told to stop"))
            client.requests.clear()
            self._flush(client)
            self._drop(client)
        self.executor.close()
        self._selector.close()
        self._signal_reader.close()
        self._signal_writer.close()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _quiet_environment() -> None:
    """No telemetry and no network from the libraries below; OpenVINO's telemetry heeds CI only."""
    os.environ["CI"] = "true"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serve an engine on a unix socket.")
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--socket-dir", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--linger", type=float, default=5.0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _quiet_environment()
    directory = protocol.private_directory(options.socket_dir)
    if options.log is not None:
        log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    lock = protocol.FileLock(directory / protocol.HOST_LOCK)
    if not lock.acquire(wait=False):
        _say(f"another engine host serves {directory}")
        return 0
    host: EngineHost | None = None

    def end(*_: object) -> None:
        if host is None:
            raise SystemExit(0)
        host.stop()

    signal.signal(signal.SIGTERM, end)
    started = time.monotonic()
    try:
        description = load_description(options.engine)
        executor = load_executor(options.engine, description)
        server = protocol.listen(directory)
        host = EngineHost(
            executor,
            EngineLimits.from_description(description),
            server,
            executor_name=str(description.get("executor", "paged")),
            linger=options.linger,
            keep=options.keep,
        )
        _say(f"engine host {os.getpid()} ready after {time.monotonic() - started:.1f} s")
        host.run()
        host.close()
        server.close()
    except Exception:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            (directory / protocol.SOCKET_NAME).unlink()
        return 1
    protocol.remove_own_folder(directory)
    lock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
