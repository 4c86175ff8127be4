"""Start, ask and stop the engine host: the process beside Triton in which the compiled model runs.

The program is the repository's own `tensorrt_llm/1/engine_host.py`; the models inside Triton reach it through the unix
socket in the folder named by LPX_ENGINE_DIR. Frames: u32 little-endian length, then UTF-8 JSON (an object or a list).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpxbuild.errors import ToolError
from lpxbuild.server import logs, processes

SOCKET_NAME = "engine.sock"
PROTOCOL = 1
_MAX_FRAME = 64 << 20


class EngineLink:
    """One connection to an engine host in the role of a probe.

    Raises (every method):
        OSError: nobody listens, or no answer in time.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(folder / SOCKET_NAME))
            self._send({"op": "hello", "protocol": PROTOCOL, "role": "probe"})
            self.hello = self._receive("hello")
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> EngineLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def stats(self) -> dict[str, Any]:
        """Counts of the engine: active, waiting, tokens_total, requests_total, last_token_age_seconds."""
        self._send({"op": "stats"})
        return self._receive("stats")

    def _send(self, message: dict[str, Any]) -> None:
        content = json.dumps(message).encode()
        self._socket.sendall(struct.pack("<I", len(content)) + content)

    def _receive(self, operation: str) -> dict[str, Any]:
        while True:
            (length,) = struct.unpack("<I", self._exactly(4))
            if length > _MAX_FRAME:
                raise OSError(f"frame of {length} bytes from the engine host")
            try:
                content = json.loads(self._exactly(length))
            except ValueError as error:
                raise OSError(f"unreadable frame from the engine host: {error}") from error
            for message in content if isinstance(content, list) else [content]:
                if message.get("op") == operation:
                    return dict(message)
                if message.get("op") == "error":
                    raise OSError(str(message.get("message")))

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise ConnectionResetError("the engine host closed the connection")
            parts += part
        return bytes(parts)


class EngineHost:
    """The engine host of one served repository.

    Args:
        version_folder: `<repository>/tensorrt_llm/1`.
        socket_folder: folder of mode 0700 for the socket.
        log_path: its output.
        environment: of the process; the interpreter of the model's parameter `engine_python` else ours runs it.
    """

    def __init__(
        self,
        version_folder: Path,
        socket_folder: Path,
        log_path: Path,
        environment: Mapping[str, str],
        interpreter: str = "",
    ) -> None:
        self.program = version_folder / "engine_host.py"
        self.engine = version_folder / "engine"
        self.socket_folder = socket_folder
        self.log_path = log_path
        self._environment = dict(environment)
        self._interpreter = interpreter or sys.executable
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.pid = 0

    def command(self) -> list[str]:
        """The command line of the host."""
        place = ["--engine", str(self.engine), "--socket-dir", str(self.socket_folder)]
        return [self._interpreter, str(self.program), *place, "--keep"]

    def start(self, timeout: float) -> None:
        """Start it and wait until the engine is loaded.

        Raises:
            ToolError: it ended, or did not answer within `timeout` seconds; `why` has its last lines.
        """
        self._log_start = logs.size(self.log_path)
        self._spawn()
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.pid = self._hello(timeout=2)
                return
            except OSError as error:
                status = self._process.poll() if self._process else None
                if status == 0:
                    # Another host has the folder's lock: a model started it, and it is loading or just going.
                    self._spawn()
                elif status is not None:
                    raise self._failure(f"the engine host ended with status {status}") from error
                if time.monotonic() > deadline:
                    self.stop(patience=2)
                    raise self._failure(f"the engine host did not answer within {timeout:.0f} s") from error
            time.sleep(0.05)

    def _spawn(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Whether the process that answered last still runs."""
        if self._process is not None:
            self._process.poll()
        return self.pid != 0 and processes.alive(self.pid)

    def kill(self) -> None:
        """SIGKILL, for a host that does not answer; `start` makes the next one."""
        if self.alive():
            processes.kill([self.pid])

    def adopt_successor(self) -> bool:
        """After a death: a model inside Triton may have started the next host already; then that one is ours now."""
        try:
            self.pid = self._hello(timeout=2)
        except OSError:
            return False
        return True

    def stats(self, timeout: float) -> dict[str, Any] | None:
        """Counts of the engine, or None where it does not answer in time."""
        try:
            with EngineLink(self.socket_folder, timeout) as link:
                return link.stats()
        except OSError:
            return None

    def stop(self, patience: float) -> None:
        """SIGTERM, and SIGKILL to its process group after `patience` seconds."""
        process = self._process
        for pid in {self.pid, process.pid if process else 0} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (self.alive() or (process is not None and process.poll() is None)):
            time.sleep(0.02)
        if process is not None:
            processes.signal_group(process.pid, signal.SIGKILL)
            process.wait()
        if self.alive():
            processes.kill([self.pid])

    def _hello(self, timeout: float) -> int:
        with EngineLink(self.socket_folder, timeout) as link:
            return int(link.hello["pid"])

    def _failure(self, what: str) -> ToolError:
        lines = logs.last_useful_lines(self.log_path, position=self._log_start)
        return ToolError(what, why="\n".join([f"its log is {self.log_path}", *lines]), next=f"cat {self.log_path}")
