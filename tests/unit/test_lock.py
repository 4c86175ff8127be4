"""recipe.lock: what is pinned, what counts as drift, where the file lies."""

from __future__ import annotations

import pytest

from lpxbuild.errors import SourceError, UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import lock, locking
from lpxbuild.recipe import Recipe
from lpxbuild.shipped import shipped

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PINNED = lock.Lock("org/model", "main", COMMIT, {"config.json": "a" * 64}, {"lpx": "1", "openvino": "2"})


def recipe(source: str = "org/model", revision: str | None = "main") -> Recipe:
    return Recipe.model_validate({"name": "x", "model": {"source": source, "revision": revision}})


def test_it_is_read_back_and_the_same_pins_are_the_same_bytes(tmp_path):
    path = tmp_path / "recipe.lock"
    assert lock.read(path) is None
    path.write_text(lock.text(PINNED))
    assert lock.read(path) == PINNED
    assert lock.text(lock.read(path)) == path.read_text()


@pytest.mark.parametrize("text", ["", "[1]", "format_version: 9", "format_version: 1\nmodel: {}", "a: [", "files: 3"])
def test_a_damaged_lock_is_refused_by_name(tmp_path, text):
    path = tmp_path / "recipe.lock"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"recipe\.lock"):
        lock.read(path)


def test_drift_names_each_pinned_thing():
    new = lock.Lock("org/model", "main", "f" * 40, {"config.json": "b" * 64, "new.json": "c" * 64}, {"openvino": "3"})
    assert PINNED.drift(PINNED) == []
    assert PINNED.drift(new) == [
        f"commit: {COMMIT} → {'f' * 40}",
        f"file config.json: {'a' * 12}… → {'b' * 12}…",
        f"file new.json: (absent) → {'c' * 12}…",
        "version of openvino: 2 → 3",
    ]
    with pytest.raises(SourceError) as caught:
        lock.refuse_drift("recipe.lock", PINNED.drift(new))
    assert "config.json" in caught.value.why


def test_a_version_that_was_not_pinned_is_drift_one_that_is_not_needed_is_none():
    assert PINNED.version_drift({"lpx": "1"}) == []
    assert PINNED.version_drift({"lpx": "1", "gguf": "0.17"}) == ["version of gguf: (absent) → 0.17"]


def test_the_pinned_commit_is_fetched_as_long_as_the_recipe_asks_for_the_same(tmp_path):
    path = tmp_path / "recipe.lock"
    path.write_text(lock.text(PINNED))
    assert locking.revision(recipe(), locking.read_for(path, recipe(), required=False)) == COMMIT
    moved = recipe(revision="v2")
    assert locking.revision(moved, locking.read_for(path, moved, required=False)) == "v2"
    assert "model.revision: main → v2" in locking.read_for(path, moved, required=True).drift(
        locking.renewed(PINNED, moved, COMMIT, PINNED.files, {})
    )


def test_versions_of_stages_that_did_not_run_stay_pinned():
    renewed = locking.renewed(PINNED, recipe(), COMMIT, {}, {"lpx": "9"})
    assert renewed.versions == {"lpx": "9", "openvino": "2"}


def test_where_it_lies(tmp_path):
    assert locking.place(tmp_path / "recipe.yaml", tmp_path / "build") == tmp_path / "recipe.lock"
    assert locking.place(tmp_path / "other.yml", tmp_path / "build") == tmp_path / "other.lock"
    assert locking.place(None, tmp_path / "build") == tmp_path / "build" / "recipe.lock"
    # A shipped recipe may lie in a folder that belongs to the installation.
    assert locking.place(shipped("recipes") / "a.yaml", tmp_path / "build") == tmp_path / "build" / "recipe.lock"


def test_an_unchanged_lock_is_not_written(tmp_path):
    path = tmp_path / "recipe.lock"
    locking.save(path, PINNED, Output.quiet())
    before = path.stat()
    locking.save(path, PINNED, Output.quiet())
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino
