"""The stub's side of the engine host: start it if nobody listens, send requests, hand messages to their owners."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import engine_protocol as protocol

Handler = Callable[[protocol.Message], None]


class EngineError(Exception):
    """The engine host cannot be reached or started; the text says why and where its log is."""


class EngineClient:
    """One connection, shared by all requests of a stub. Handlers run in the reader thread, one message at a time."""

    _LINGER = "5"  # seconds that the host waits for another stub after the last one

    def __init__(self, engine: Path, *, python: str = "", role: str = "stub") -> None:
        self._engine = engine
        self._python = python
        self._role = role
        self.directory = protocol.socket_directory(engine)
        self._numbers = itertools.count(1)
        self._handlers: dict[int, Handler] = {}
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> protocol.Message:
        """Connect, starting the host when nobody listens; its hello (limits, vocab_size, end_ids, pad_id).

        Raises EngineError. Blocks while the host loads the engine.
        """
        with self._opening:
            if self._socket is not None:
                return self._hello
            connection = self._connect_or_start()
            decoder = protocol.FrameDecoder()
            try:
                connection.sendall(protocol.encode({"op": "hello", "protocol": protocol.PROTOCOL, "role": self._role}))
                first: list[protocol.Message] = []
                while not first:
                    data = connection.recv(1 << 16)
                    if not data:
                        raise EngineError(f"the engine host in {self.directory} closed the connection")
                    first = decoder.feed(data)
                self._hello = protocol.check_hello(first[0])
            except (OSError, protocol.ProtocolError) as error:
                connection.close()
                raise EngineError(f"engine host in {self.directory}: {error}") from error
            except EngineError:
                connection.close()
                raise
            self._socket = connection
            threading.Thread(target=self._read, args=(connection, decoder), daemon=True).start()
            return self._hello

    def add(self, message: protocol.Message, handler: Handler) -> int:
        """Send an "add" request; `handler` gets its messages, the last one always an "end". Raises EngineError."""
        self.open()
        identity = next(self._numbers)
        with self._lock:
            self._handlers[identity] = handler
        try:
            self._send({**message, "op": "add", "id": identity})
        except OSError as error:
            with self._lock:
                alone = self._handlers.pop(identity, None)
            if alone is not None:
                raise EngineError(f"engine host in {self.directory}: {error}") from error
        return identity

    def cancel(self, identity: int, index: int | None = None) -> None:
        """Ask for the end of a request, or of one of its sequences; its "end" message still comes."""
        message: protocol.Message = {"op": "cancel", "id": identity}
        if index is not None:
            message["index"] = index
        try:
            self._send(message)
        except OSError:
            return  # the reader notices the same and ends every request

    def cancel_tagged(self, tag: str) -> None:
        """End every request added with this tag, through whatever stub."""
        try:
            self._send({"op": "cancel", "tag": tag})
        except OSError:
            return

    def close(self) -> None:
        """Hang up; the host ends by itself when it was the last stub."""
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _send(self, message: protocol.Message) -> None:
        frame = protocol.encode(message)
        with self._lock:
            if self._socket is None:
                raise ConnectionResetError("the connection is closed")
            self._socket.sendall(frame)

    def _read(self, connection: socket.socket, decoder: protocol.FrameDecoder) -> None:
        reason = "ended"
        try:
            while data := connection.recv(1 << 16):
                for message in decoder.feed(data):
                    self._dispatch(message)
        except (OSError, protocol.ProtocolError) as error:
            reason = f"is gone ({error})"
        with self._lock:
            if self._socket is connection:
                self._socket = None
            orphans, self._handlers = self._handlers, {}
        connection.close()
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            reason += f", exit code {code}"
        text = f"the engine host {reason}; its log is {self.directory / protocol.LOG_NAME}"
        for identity, handler in orphans.items():
            _hand_over(handler, {"op": "end", "id": identity, "reason": "error", "message": text, "last": True})

    def _dispatch(self, message: protocol.Message) -> None:
        identity = message.get("id")
        if not isinstance(identity, int):
            return
        with self._lock:
            handler = self._handlers.pop(identity, None) if message.get("last") else self._handlers.get(identity)
        if handler is not None:
            _hand_over(handler, message)

    def _connect_or_start(self) -> socket.socket:
        try:
            protocol.private_directory(self.directory)
            return protocol.connect(self.directory)
        except protocol.ProtocolError as error:
            raise EngineError(str(error)) from error
        except OSError:
            pass
        try:
            return self._start_and_connect()
        except OSError as error:
            raise EngineError(f"the engine host cannot be started in {self.directory}: {error}") from error

    def _start_and_connect(self) -> socket.socket:
        with protocol.FileLock(self.directory / protocol.START_LOCK):
            self._process = None
            while True:
                try:
                    return protocol.connect(self.directory)
                except OSError:
                    pass
                if self._process is None:
                    self._process = self._start()
                code = self._process.poll()
                if code == 0:
                    self._process = None  # another host holds the folder and is loading, or has just gone: look again
                elif code is not None:
                    raise EngineError(f"the engine host failed (exit code {code}): {self._last_words()}")
                time.sleep(0.05)

    def _start(self) -> subprocess.Popen[bytes]:
        python = self._python or shutil.which("python3")
        if not python:
            raise EngineError("no python3 in PATH to run the engine host with; set the parameter engine_python")
        command = [python, str(Path(__file__).resolve().parent / "engine_host.py")]
        command += ["--engine", str(self._engine), "--socket-dir", str(self.directory)]
        command += ["--log", str(self.directory / protocol.LOG_NAME), "--linger", self._LINGER]
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=self.directory, env=dict(os.environ))
        except OSError as error:
            raise EngineError(f"cannot run {python}: {error}") from error

    def _last_words(self) -> str:
        path = self.directory / protocol.LOG_NAME
        try:
            lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return f"no log at {path}"
        return f"{' '.join(lines[-1:])} (log: {path})"


def _hand_over(handler: Handler, message: protocol.Message) -> None:
    """One request's trouble ends nobody else's: this thread is the only one that reads."""
    try:
        handler(message)
    except Exception:
        traceback.print_exc()
