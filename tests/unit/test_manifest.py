"""manifest.json: whole or refused; and what in a build folder is not as it says."""

from __future__ import annotations

import json
import os

import pytest

from lpxbuild.errors import UsageError
from lpxbuild.pipeline import manifest
from lpxbuild.pipeline.digest import record_file


@pytest.fixture
def build(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.bin").write_bytes(b"1234")
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    view = {
        "engine": {"a.bin": record_file(tmp_path / "engine" / "a.bin").as_dict()},
        ".": {"recipe.yaml": record_file(tmp_path / "recipe.yaml").as_dict()},
    }
    data = {name: {} for name in ("recipe", "inputs", "stages", "versions", "evidence")}
    data |= {"name": "x", "state": "built to engine", "backend": "openvino", "notices": [], "view": view}
    manifest.write(tmp_path, data)
    return tmp_path, data


def test_it_is_read_back_as_written(build):
    folder, data = build
    found = manifest.read(folder)
    assert found.state == "built to engine"
    assert found.same_as(data)
    assert not found.same_as(data | {"state": "proven"})
    assert found.view("engine")["a.bin"].size == 4
    assert manifest.differences(folder, found, full=True) == []
    assert list(folder.glob(".tmp-*")) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("built to engine", "proven"),
        lambda text: text.replace('"backend"', '"backends"'),
        lambda text: text.replace('"format_version": 1', '"format_version": 2'),
        lambda text: "[]",
        lambda text: "",
    ],
)
def test_a_cut_or_edited_one_is_refused(build, change):
    folder, _ = build
    path = folder / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(UsageError, match=r"manifest\.json"):
        manifest.read(folder)


def test_a_folder_without_one_is_no_build(tmp_path):
    with pytest.raises(UsageError, match="not a build folder"):
        manifest.read(tmp_path)


def test_differences_name_each_file(build):
    folder, _ = build
    found = manifest.read(folder)
    path = folder / "engine" / "a.bin"
    status = path.stat()
    path.write_bytes(b"1235")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (folder / "engine" / "b").touch()
    (folder / "recipe.yaml").unlink()
    (folder / "logs").mkdir()  # not part of what was built
    assert sorted(manifest.differences(folder, found)) == [
        "engine/a.bin was changed after the build",
        "engine/b does not belong there",
        "recipe.yaml is missing",
    ]


def test_touching_a_file_is_no_difference(build):
    folder, _ = build
    (folder / "engine" / "a.bin").touch()
    assert manifest.differences(folder, manifest.read(folder)) == []


def test_its_text_is_json_for_other_tools(build):
    folder, _ = build
    data = json.loads((folder / "manifest.json").read_text())
    assert data["state"] == "built to engine"
    assert data["written_at"].endswith("+00:00")
