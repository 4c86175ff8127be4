"""The hub path with the real huggingface_hub client, against a server on this host that speaks the hub's API."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from lpxbuild.errors import HostError, SourceError
from lpxbuild.output import Output
from lpxbuild.pipeline import building
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.recipe import Recipe
from lpxbuild.source import check, check_config, fetch

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))
import pipeline_stages

CASES = Path(__file__).parents[1] / "cases" / "data"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
MODEL = "example-org/tiny"
SHARD = "model-00002-of-00002.safetensors"


class Hub:
    """What the server offers, how it misbehaves, what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.revisions = {"main": COMMIT, "v1": OTHER_COMMIT}
        self.gated = False
        self.tells_sizes = True
        self.cut_after: int | None = None  # bytes of a weight file after which the connection breaks
        self.refuse_after: int | None = None  # answers of the storage after which it is gone
        self.stalled: threading.Event | None = None  # when set, weights stop coming half-way until the event
        self.token: str | None = None  # when set, the repository is private
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def add_folder(self, folder: Path) -> None:
        for file in folder.iterdir():
            if file.name != "case.json":
                self.files[file.name] = file.read_bytes()

    def downloads(self, name: str) -> list[dict[str, str]]:
        return [headers for method, path, headers in self.requests if method == "GET" and path.endswith(f"/{name}")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_args) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, {key.lower(): value for key, value in self.headers.items()}))
        if (
            not path.startswith("/cdn/")
            and self.hub.token
            and self.headers.get("Authorization") != f"Bearer {self.hub.token}"
        ):
            return self._error(401, "RepoNotFound")
        if path.startswith("/cdn/"):
            if self.hub.refuse_after is not None and len(self.hub.downloads(path.lstrip("/"))) > self.hub.refuse_after:
                return self._error(503, "Down")
            return self._file(path.rsplit("/", 1)[1], {})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        if match:
            return self._api(match[1], match[2], match[3] or "main")
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match and match[1] == MODEL:
            return self._resolve(match[2], match[3])
        return self._error(404, "RepoNotFound")

    def _commit(self, revision: str) -> str | None:
        commits = self.hub.revisions
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def _api(self, model: str, kind: str | None, revision: str) -> None:
        if model != MODEL:
            return self._error(401, "RepoNotFound")  # what the hub says to somebody without a token
        commit = self._commit(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound")
        siblings = []
        for name, data in self.hub.files.items():
            entry = {"rfilename": name, "path": name, "type": "file", "size": len(data), "oid": "0" * 40}
            entry["blobId"] = hashlib.sha1(data).hexdigest()
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 134}
            if kind != "tree" and not self.hub.tells_sizes:
                entry = {"rfilename": name}
            siblings.append(entry)
        body = siblings if kind == "tree" else {"id": MODEL, "modelId": MODEL, "sha": commit, "siblings": siblings}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, revision: str, name: str) -> None:
        commit = self._commit(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound")
        if name not in self.hub.files:
            return self._error(404, "EntryNotFound", {"X-Repo-Commit": commit})
        if self.hub.gated:
            return self._error(403, "GatedRepo")
        data = self.hub.files[name]
        if not name.endswith(".safetensors"):
            etag = hashlib.sha1(data).hexdigest()
            return self._file(name, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Location": f"http://localhost:{self.server.server_port}/cdn/{name}",
        }
        return self._send(302, b"", headers)

    def _file(self, name: str, headers: dict[str, str]) -> None:
        data = self.hub.files[name]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, data, headers)
        begin = int(wanted[1])
        headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        return self._send(206, data[begin:], headers)

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body)), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.stalled is not None and self.path.startswith("/cdn/"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.hub.stalled.wait(30)
            return
        cut = self.hub.cut_after
        if cut is not None and len(body) > cut and self.path.startswith("/cdn/"):
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    # The library reads HF_HOME when it is imported, which another test may have done.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    # It waits up to 16 s between attempts to resume.
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def get(revision: str | None = None, destination: Path | None = None, output: Output | None = None) -> Path:
    return fetch(MODEL, revision, destination=destination, output=output or Output.quiet())


def test_downloads_what_is_needed_and_pins_the_commit(hub):
    hub.add_folder(CASES / "baseline_tp2")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.onnx", "model.gguf", "README.md"):
        hub.files[name] = b"x" * 1000
    folder = get()
    present = {file.name for file in folder.iterdir()}
    assert present == {file.name for file in (CASES / "baseline_tp2").iterdir()} - {"case.json"}
    source = check(folder, origin=MODEL, need_tokenizer=True, output=Output.quiet())
    assert source.revision == COMMIT
    weights = {file.name: file.sha256 for file in source.files if file.name.endswith(".safetensors")}
    assert weights == {name: hashlib.sha256(hub.files[name]).hexdigest() for name in weights}
    assert len(weights) == 2


def test_code_comes_along_where_the_config_names_some(hub):
    hub.add_folder(CASES / "baseline")
    hub.files |= dict.fromkeys(("modeling_x.py", "tools/run.py"), b"raise SystemExit\n")
    assert not list(get("v1").glob("*.py"))
    config = {**json.loads(hub.files["config.json"]), "auto_map": {"AutoModel": "modeling_x.X"}}
    hub.files["config.json"] = json.dumps(config).encode()
    folder = get()
    assert [file.name for file in folder.rglob("*.py")] == ["modeling_x.py"]
    source = check(folder, origin=MODEL, need_tokenizer=True, output=Output.quiet())
    assert "modeling_x.py" in {file.name for file in source.files}


@pytest.mark.parametrize(("revision", "commit"), [("v1", OTHER_COMMIT), (OTHER_COMMIT, OTHER_COMMIT)])
def test_a_tag_and_a_commit_name_the_same_folder(hub, revision, commit):
    hub.add_folder(CASES / "baseline")
    folder = get(revision)
    assert check(folder, origin=MODEL, need_tokenizer=True, output=Output.quiet()).revision == commit


def test_a_plain_folder_as_destination_keeps_commit_and_hashes(hub, tmp_path):
    hub.add_folder(CASES / "baseline")
    folder = get(destination=tmp_path / "model")
    assert folder == tmp_path / "model"
    source = check(folder, origin=MODEL, need_tokenizer=True, output=Output.quiet())
    assert source.revision == COMMIT
    sums = {file.name: file.sha256 for file in source.files}
    assert sums["model.safetensors"] == hashlib.sha256(hub.files["model.safetensors"]).hexdigest()
    assert sums["config.json"] is None


def test_a_second_fetch_loads_no_weights_again(hub):
    hub.add_folder(CASES / "baseline_tp2")
    assert get() == get()
    assert len(hub.downloads(f"cdn/{SHARD}")) == 1


def test_a_broken_download_goes_on_where_it_stopped(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16384)  # what has come is kept in whole chunks
    hub.add_folder(CASES / "baseline")
    name = "model.safetensors"
    hub.cut_after = 100_000
    hub.refuse_after = 1  # then the storage is gone: this run has to fail
    with pytest.raises(HostError, match=MODEL):
        get()
    first = len(hub.downloads(f"cdn/{name}"))
    hub.cut_after = hub.refuse_after = None
    folder = get()
    assert (folder / name).read_bytes() == hub.files[name]
    (resumed,) = hub.downloads(f"cdn/{name}")[first:]
    begin = int(resumed["range"].removeprefix("bytes=").split("-")[0])
    assert begin == 100_000 // 16384 * 16384
    assert not list(folder.parents[1].rglob("*partial*"))


def test_a_resumed_file_that_does_not_match_is_loaded_anew(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16384)
    hub.add_folder(CASES / "baseline")
    hub.cut_after, hub.refuse_after = 100_000, 1
    with pytest.raises(HostError):
        get()
    hub.cut_after = hub.refuse_after = None
    (partial,) = Path(constants.HF_HUB_CACHE).rglob("*.lpx-partial")
    partial.write_bytes(bytes(partial.stat().st_size))
    assert (get() / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_ctrl_c_ends_a_download_at_once(hub, tmp_path):
    hub.add_folder(CASES / "baseline")
    hub.stalled = threading.Event()
    script = (
        "from lpxbuild.source import fetch; from lpxbuild.output import Output;"
        f"fetch({MODEL!r}, None, output=Output.quiet())"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    child = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not hub.downloads("cdn/model.safetensors"):
            assert time.monotonic() < deadline
            assert child.poll() is None, child.stderr.read()
            threading.Event().wait(0.05)
        begun = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=10)
        assert time.monotonic() - begun < 3
        assert "KeyboardInterrupt" in said
    finally:
        hub.stalled.set()
        child.kill()
        child.wait()


def test_a_mirror_that_tells_no_sizes(hub):
    hub.add_folder(CASES / "baseline")
    hub.tells_sizes = False
    assert (get() / "model.safetensors").exists()


def test_gated(hub):
    hub.add_folder(CASES / "baseline")
    hub.gated = True
    with pytest.raises(SourceError, match="gated") as refusal:
        get()
    assert "HF_TOKEN" in refusal.value.next
    assert f"/{MODEL}" in refusal.value.next


def test_missing_repository(hub):
    with pytest.raises(SourceError, match="no model example-org/absent") as refusal:
        fetch("example-org/absent", None, output=Output.quiet())
    assert "HF_TOKEN is not set" in refusal.value.why


def test_missing_revision(hub):
    hub.add_folder(CASES / "baseline")
    with pytest.raises(SourceError, match="no revision 'v9'"):
        get("v9")


def test_the_token_comes_from_the_environment(hub, monkeypatch):
    hub.add_folder(CASES / "baseline")
    hub.token = "hf_secret_of_the_test"
    with pytest.raises(SourceError) as refusal:
        get()
    assert hub.token not in str(refusal.value)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (get() / "model.safetensors").exists()
    assert all("authorization" not in headers for headers in hub.downloads("cdn/model.safetensors"))


@pytest.mark.parametrize("where", ["HF_TOKEN_PATH", "HF_HOME"])
def test_the_token_comes_from_a_file(hub, tmp_path, monkeypatch, where):
    hub.add_folder(CASES / "baseline")
    hub.token = "hf_secret_of_a_file"
    file = tmp_path / "secrets" / ("token" if where == "HF_HOME" else "mine")
    file.parent.mkdir()
    file.write_text(hub.token + "\n")
    monkeypatch.setenv(where, str(file.parent if where == "HF_HOME" else file))
    assert (get() / "config.json").is_file()


def test_a_token_is_written_nowhere(hub, tmp_path, monkeypatch):
    ran = pipeline_stages.install(monkeypatch)
    hub.add_folder(CASES / "baseline")
    hub.token = "hf_secret_of_the_test"
    monkeypatch.setenv("HF_TOKEN", hub.token)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"name: tiny\nmodel: {{source: {MODEL}}}\n")
    output = Output("human", stdout=io.StringIO(), stderr=io.StringIO())
    result = building.build(
        Recipe.load(recipe), recipe_path=recipe, cache_dir=tmp_path / "lpx", build_dir=tmp_path / "build", output=output
    )
    assert (result.state, len(ran)) == ("proven", 4)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"manifest.json", "artifact.json", "r.lock", "recipe.yaml"}
    assert [path for path in files if hub.token.encode() in path.read_bytes()] == []
    assert hub.token not in output.stdout.getvalue() + output.stderr.getvalue()


def test_weights_other_than_safetensors_are_refused_before_download(hub):
    hub.add_folder(CASES / "baseline")
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    with pytest.raises(SourceError, match=r"no model\.safetensors") as refusal:
        get()
    assert "pytorch_model.bin" in refusal.value.why
    assert not hub.downloads("pytorch_model.bin")


def test_an_index_that_names_an_absent_shard_is_refused_before_download(hub):
    hub.add_folder(CASES / "shard_missing")
    with pytest.raises(SourceError, match=SHARD):
        get()
    assert not [path for _method, path, _headers in hub.requests if path.startswith("/cdn/")]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("source_bnb", "bitsandbytes"),
        ("architecture_unknown", "FooForCausalLM"),
        ("lora_adapter_dir", "example-org/tiny-base"),
    ],
)
def test_models_that_are_refused_cost_no_weight_download(hub, case, word):
    hub.add_folder(CASES / case)
    with pytest.raises(SourceError, match=word):
        get()
    assert not [path for _method, path, _headers in hub.requests if path.startswith("/cdn/")]


@pytest.mark.parametrize(
    ("use", "word"),
    [({"layout": "tensorrt_llm"}, "zero points"), ({"layout": "unified_hf", "scheme": Scheme("fp8")}, "second time")],
)
def test_what_a_recipe_cannot_have_costs_no_weight_download(hub, use, word):
    hub.add_folder(CASES / "source_awq")
    with pytest.raises(SourceError) as refusal:
        fetch(MODEL, None, accept=partial(check_config, **use), output=Output.quiet())
    assert word in str(refusal.value)
    assert not [path for _method, path, _headers in hub.requests if path.startswith("/cdn/")]
    fetch(MODEL, None, accept=partial(check_config, layout="unified_hf"), output=Output.quiet())


def test_no_network(hub, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(HostError, match=f"no connection to http://127.0.0.1:{port}") as refusal:
        get()
    assert refusal.value.exit_code == 3
    assert "HF_HUB_OFFLINE" in refusal.value.next


def test_offline_uses_the_cache_and_nothing_else(hub, monkeypatch):
    hub.add_folder(CASES / "baseline")
    folder = get()
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get() == folder
    assert get(COMMIT) == folder
    assert len(hub.requests) == asked
    with pytest.raises(HostError, match="HF_HUB_OFFLINE is set"):
        get("v1")


def test_disk_space_is_checked_before_the_weights(hub, monkeypatch):
    hub.add_folder(CASES / "baseline")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(HostError, match="not enough disk space"):
        get()
    assert not hub.downloads("cdn/model.safetensors")


def test_a_file_that_is_shorter_than_the_hub_says_is_named(hub):
    hub.add_folder(CASES / "baseline")
    blob = (get() / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"model\.safetensors has \d+ bytes, the hub says \d+") as refusal:
        get()
    assert str(blob) in refusal.value.next


@pytest.mark.parametrize("name", ["../outside.safetensors", "weights/model.safetensors", "model.bin", 3])
def test_an_index_that_names_other_places_is_refused_before_a_weight_is_written(hub, tmp_path, name):
    hub.add_folder(CASES / "baseline")
    del hub.files["model.safetensors"]
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
    hub.files[str(name)] = b"x" * 100
    with pytest.raises(SourceError, match=re.escape(repr(name))):
        get(destination=tmp_path / "model")
    assert not list(tmp_path.rglob("outside*"))
    assert not hub.downloads(str(name))
