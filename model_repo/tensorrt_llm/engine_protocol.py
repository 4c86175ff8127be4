"""How a Triton stub and the engine host talk: frames, messages, the socket's folder and locks. Standard library only.

A frame is a little-endian u32 byte count and UTF-8 JSON: one message (an object) or several (a list of objects). The
first message in each direction is a hello that carries the protocol version; a peer with another version is refused.

client -> host
  {"op":"hello","protocol":1,"role":"stub"|"probe"}       a probe does not keep the host alive
  {"op":"add","id":n,"input_ids":[..],"max_tokens":n, ...}  fields: `engine_request.parse`
  {"op":"cancel","id":n}  or with "index":i for one sequence of a request with several; {"op":"cancel","tag":"x"} for
                            every request that was added with "tag":"x", by whatever client
  {"op":"stats"}
host -> client
  {"op":"hello","protocol":1,"limits":{..},"executor":..,"vocab_size":..,"end_ids":[..],"pad_id":..,"pid":..}
  {"op":"tokens","id":n,"sequences":[{"index":0,"ids":[..],"log_probs":[..]}]}
  {"op":"end","id":n,"index":i,"reason":"stop"|"length"|"cancelled"|"error","message":..,
   "last":true}         index: the sequence; absent = all of them; last: nothing more comes for this id
  {"op":"stats","active":n,"waiting":n,"tokens_total":n,"requests_total":n,"last_token_age_seconds":x|null}
End ids never appear among `ids`. `active` counts every request that still owns engine memory, `waiting` those of them
that have no token yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROTOCOL = 1
MAX_FRAME = 64 << 20
SOCKET_NAME = "engine.sock"
LOG_NAME = "engine_host.log"
START_LOCK = "start.lock"  # held by whoever starts a host
HOST_LOCK = "host.lock"  # held by the host for its whole life
DIRECTORY_VARIABLE = "LPX_ENGINE_DIR"

Message = dict[str, Any]


class ProtocolError(Exception):
    """The peer speaks something else, or another version of the protocol."""


def encode(messages: Message | list[Message]) -> bytes:
    """One frame for one message, or for a list of messages that belong together."""
    body = json.dumps(messages, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_FRAME}")
    return struct.pack("<I", len(body)) + body


class FrameDecoder:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from("<I", self._buffer)
            if size > MAX_FRAME:
                raise ProtocolError(f"frame of {size} bytes; the limit is {MAX_FRAME}")
            if len(self._buffer) < 4 + size:
                break
            try:
                body = json.loads(bytes(self._buffer[4 : 4 + size]))
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"frame is not JSON: {error}") from error
            del self._buffer[: 4 + size]
            batch = body if isinstance(body, list) else [body]
            if not all(isinstance(message, dict) for message in batch):
                raise ProtocolError("frame holds something that is not a message")
            messages += batch
        return messages


def check_hello(message: Message) -> Message:
    """The peer's hello, or ProtocolError naming both versions."""
    if message.get("op") != "hello":
        raise ProtocolError(f"first message is {message.get('op')!r}, not 'hello'")
    if message.get("protocol") != PROTOCOL:
        raise ProtocolError(f"the peer speaks engine protocol {message.get('protocol')!r}, this side {PROTOCOL}")
    return message


def socket_directory(engine: str | Path) -> Path:
    """$LPX_ENGINE_DIR, else <temp>/lpx-<uid>/<16 hex of the engine folder's real path>."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named)
    digest = hashlib.sha256(os.path.realpath(engine).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"lpx-{os.getuid()}" / digest


def private_directory(path: Path) -> Path:
    """Make `path` (and a missing parent) with mode 0700; refuse one that another user owns or can enter."""
    for folder in (path.parent, path):
        # A shared parent such as /tmp is not ours to restrict; the folder itself always is.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
    # The default's parent has a name that anybody can guess: who made it first could exchange what lies in it.
    ours = (path.parent, path) if path.parent.name == f"lpx-{os.getuid()}" else (path,)
    for folder in ours:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ProtocolError(f"{folder} is not a folder of this user; remove it or set {DIRECTORY_VARIABLE}")
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    return path


@contextlib.contextmanager
def _address(directory: Path) -> Iterator[str]:
    """Socket address; a path beyond the 107 bytes of sun_path is reached through /proc/self/fd."""
    path = str(directory / SOCKET_NAME)
    if len(os.fsencode(path)) <= 107:
        yield path
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


def connect(directory: Path) -> socket.socket:
    """A connected socket; OSError (ConnectionRefusedError, FileNotFoundError) when nobody listens."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(directory) as address:
            client.connect(address)
    except OSError:
        client.close()
        raise
    return client


def listen(directory: Path) -> socket.socket:
    """Bind the socket; the caller holds HOST_LOCK, so a file that is already there is a dead host's."""
    with contextlib.suppress(FileNotFoundError):
        (directory / SOCKET_NAME).unlink()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(directory) as address:
        server.bind(address)
    server.listen(64)
    return server


class FileLock:
    """Exclusive flock on a file that may be deleted under it: held only if the path still names the locked file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self, *, wait: bool) -> bool:
        while True:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    self._file = descriptor
                    return True
            os.close(descriptor)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> FileLock:
        self.acquire(wait=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def remove_own_folder(directory: Path) -> None:
    """Leave nothing in the temporary folder; a named folder ($LPX_ENGINE_DIR) belongs to whoever named it."""
    with contextlib.suppress(OSError):
        (directory / SOCKET_NAME).unlink()
    if os.environ.get(DIRECTORY_VARIABLE):
        return
    starting = FileLock(directory / START_LOCK)
    if starting.acquire(wait=False):
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.parent.rmdir()
        starting.release()
