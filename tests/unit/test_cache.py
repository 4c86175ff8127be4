"""The cache and what it stands on: digests, placing, locks, pruning."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from lpxbuild.errors import HostError, VerdictError
from lpxbuild.output import Output
from lpxbuild.pipeline import command, digest, placing
from lpxbuild.pipeline.artifact import Artifact
from lpxbuild.pipeline.cache import Cache, default_root

QUIET = Output.quiet()


def add(cache: Cache, stage: str, key: str, files: dict[str, bytes]) -> Artifact:
    lock = cache.lock(stage, key, output=QUIET)
    assert lock.try_exclusive()
    try:
        with cache.temporary(stage, key) as temporary:
            for name, data in files.items():
                path = temporary / "files" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            records = {name: digest.record_file(temporary / "files" / name) for name in files}
            artifact = Artifact(stage, key, temporary, {"recipe:a": "1"}, records, made_at="2026-01-01T00:00:00+00:00")
            return cache.commit(temporary, artifact)
    finally:
        lock.close()


def test_digests_are_sha256(tmp_path):
    data = os.urandom(3_000_001)
    (tmp_path / "a").write_bytes(data)
    assert digest.sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()
    expected = hashlib.sha256(b"11  a\n22  b/c\n").hexdigest()
    assert digest.combined({"b/c": "22", "a": "11"}) == expected


def test_large_sets_are_hashed_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "PARALLEL_BYTES", 10)
    paths = []
    for number in range(5):
        path = tmp_path / str(number)
        path.write_bytes(b"x" * number * 100)
        paths.append(path)
    assert [record.sha256 for record in digest.record_files(paths)] == [
        hashlib.sha256(b"x" * number * 100).hexdigest() for number in range(5)
    ]


def test_an_artifact_is_found_again_as_it_was_written(tmp_path):
    cache = Cache(tmp_path)
    written = add(cache, "engine", "k" * 40, {"a/b.bin": b"1", "c": b"22"})
    found = cache.find("engine", "k" * 40)
    assert found == written
    assert found.size == 3
    assert found.problems(full=True)[0] == []
    assert cache.find("engine", "x" * 40) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda folder: (folder / "c").unlink(), "c is missing"),
        (lambda folder: (folder / "d").touch(), "d does not belong there"),
        (lambda folder: (folder / "c").write_bytes(b"223"), "c has 3 bytes, 2 were written"),
        (lambda folder: (folder / "c").write_bytes(b"33"), "c was changed"),
        (lambda folder: ((folder / "c").unlink(), (folder / "c").symlink_to("a/b.bin")), "not a plain file"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path, change, word):
    artifact = add(Cache(tmp_path), "engine", "k" * 40, {"a/b.bin": b"1", "c": b"22"})
    change(artifact.path)
    problems, _ = artifact.problems(full=False)
    assert len(problems) == 1
    assert word in problems[0]


def test_a_flipped_byte_with_restored_times_shows_by_the_ctime(tmp_path):
    artifact = add(Cache(tmp_path), "engine", "k" * 40, {"c": b"22"})
    path = artifact.path / "c"
    status = path.stat()
    time.sleep(0.02)
    path.write_bytes(b"32")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (status.st_size, status.st_mtime_ns, status.st_ino)
    assert artifact.problems(full=False)[0][0].startswith("c was changed")


def test_a_record_that_was_edited_or_cut_counts_as_no_artifact(tmp_path):
    cache = Cache(tmp_path)
    artifact = add(cache, "engine", "k" * 40, {"c": b"22"})
    path = artifact.folder / "artifact.json"
    text = path.read_text()
    for bad in (
        text[:-20],
        text.replace('"c"', '"d"'),
        text.replace('"format_version": 1', '"format_version": 9'),
        "[]",
    ):
        path.write_text(bad)
        assert cache.find("engine", "k" * 40) is None
    path.write_text(text)
    assert cache.find("engine", "k" * 40) is not None


def test_an_unfinished_folder_is_removed_and_never_found(tmp_path):
    cache = Cache(tmp_path)

    def interrupted() -> None:
        with cache.temporary("engine", "k" * 40) as temporary:
            (temporary / "files" / "half").write_bytes(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "engine").iterdir()) == []
    assert cache.ls() == []


def test_sweep_removes_folders_of_dead_processes_and_leaves_living_ones(tmp_path):
    cache = Cache(tmp_path)
    for key in ("a" * 40, "b" * 40):
        (tmp_path / "engine" / f".tmp-{key}-0123456789ab" / "files").mkdir(parents=True)
    alive = cache.lock("engine", "b" * 40, output=QUIET)
    assert alive.try_exclusive()
    assert cache.sweep(output=QUIET) == 1
    assert [path.name[5] for path in (tmp_path / "engine").iterdir()] == ["b"]
    alive.close()
    assert cache.sweep(output=QUIET) == 1


def test_replacing_an_artifact_leaves_one(tmp_path):
    cache = Cache(tmp_path)
    add(cache, "engine", "k" * 40, {"c": b"22"})
    add(cache, "engine", "k" * 40, {"c": b"33"})
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["k" * 40]
    assert (cache.find("engine", "k" * 40).path / "c").read_bytes() == b"33"


def aged(cache: Cache, ages: dict[str, float]) -> None:
    for key, age in ages.items():
        artifact = add(cache, "engine", key * 40, {"c": b"x" * 100})
        moment = time.time() - age
        os.utime(artifact.folder, (moment, moment))


def keys(entries) -> str:
    return "".join(sorted(entry.key[0] for entry in entries))


def test_prune_by_age_size_and_number(tmp_path):
    cache = Cache(tmp_path)
    aged(cache, {"a": 10, "b": 2000, "c": 3000, "d": 4000})
    assert [entry.key[0] for entry in cache.ls()] == ["a", "b", "c", "d"]
    assert keys(cache.prune(older_than=2500, dry_run=True, output=QUIET).removed) == "cd"
    assert keys(cache.prune(max_bytes=150, dry_run=True, output=QUIET).removed) == "bcd"
    assert keys(cache.prune(max_bytes=400, dry_run=True, output=QUIET).removed) == ""
    assert keys(cache.prune(keep=3, dry_run=True, output=QUIET).removed) == "d"
    assert keys(cache.prune(dry_run=True, output=QUIET).removed) == "abcd"
    assert len(cache.ls()) == 4
    assert keys(cache.prune(older_than=2500, output=QUIET).removed) == "cd"
    assert keys(cache.ls()) == "ab"


def test_prune_leaves_what_a_running_build_holds(tmp_path):
    cache = Cache(tmp_path)
    aged(cache, {"a": 10})
    lock = cache.lock("engine", "a" * 40, output=QUIET)
    assert lock.try_shared()
    pruned = cache.prune(include_used=True, output=QUIET)
    assert pruned.removed == ()
    assert pruned.kept_in_use[0].used_by == ("a build that runs now",)
    lock.close()
    assert keys(cache.prune(output=QUIET).removed) == "a"


def test_an_artifact_that_another_prune_removed_is_no_error(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    for key in ("a" * 40, "b" * 40):
        add(cache, "engine", key, {"a": b"1"})
    listed = cache._folders()
    entries = cache.ls()
    for folder in listed:
        shutil.rmtree(folder)
    monkeypatch.setattr(cache, "_folders", lambda: listed)
    assert cache.ls() == []
    monkeypatch.setattr(cache, "ls", lambda: entries)
    assert len(cache.prune(output=QUIET).removed) == 2


def test_a_manifest_of_any_bytes_can_be_asked_for_its_artifacts(tmp_path):
    cache = Cache(tmp_path / "cache")
    artifact = add(cache, "engine", "a" * 40, {"a": b"1"})
    build = tmp_path / "build"
    build.mkdir()
    cache.mark_used(artifact, build)
    (build / "manifest.json").write_bytes(b"\xff" + artifact.key.encode())
    assert cache.ls()[0].used_by == (str(build),)


def test_a_build_folder_that_is_gone_uses_nothing(tmp_path):
    cache = Cache(tmp_path / "cache")
    artifact = add(cache, "engine", "a" * 40, {"c": b"1"})
    build = tmp_path / "build"
    build.mkdir()
    (build / "manifest.json").write_text(artifact.key)
    cache.mark_used(artifact, build)
    assert cache.ls()[0].used_by == (str(build),)
    assert cache.prune(output=QUIET).removed == ()
    (build / "manifest.json").unlink()
    assert cache.ls()[0].used_by == ()


def test_remembered_digests_are_taken_again_after_any_difference(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    remembered = digest.RememberedDigests(tmp_path / "store")
    time.sleep(0.06)
    first = remembered.digests(folder, ["a"])
    hashed: list[Path] = []
    real = digest.sha256_file
    monkeypatch.setattr(digest, "sha256_file", lambda path, advance: hashed.append(path) or real(path, advance))
    assert remembered.digests(folder, ["a"]) == first
    assert hashed == []
    assert remembered.digests(folder, ["a"], fresh=True) == first
    assert len(hashed) == 1
    (folder / "a").touch()
    remembered.digests(folder, ["a"])
    assert len(hashed) == 2
    next((tmp_path / "store").iterdir()).write_text("{")
    assert remembered.digests(folder, ["a"]) == first
    assert len(hashed) == 3


def test_two_sources_in_one_folder_do_not_forget_each_other(tmp_path, monkeypatch):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    time.sleep(0.06)
    remembered = digest.RememberedDigests(tmp_path / "store")
    known = {name: remembered.digests(tmp_path, [name]) for name in ("a.gguf", "b.gguf")}
    monkeypatch.setattr(digest, "sha256_file", lambda path, _advance: pytest.fail(f"{path} was hashed"))
    assert {name: remembered.digests(tmp_path, [name]) for name in ("a.gguf", "b.gguf")} == known


def test_a_file_as_young_as_a_clock_tick_is_not_remembered(tmp_path):
    """Two writes within one tick have the same times: git calls such an index entry racy."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    remembered = digest.RememberedDigests(tmp_path / "store")
    assert remembered.digests(folder, ["a"]) == {"a": hashlib.sha256(b"1").hexdigest()}
    assert '"files": {}' in next((tmp_path / "store").iterdir()).read_text()


def test_digests_that_came_with_the_files_are_taken_without_reading(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"1")
    monkeypatch.setattr(digest, "sha256_file", None)
    remembered = digest.RememberedDigests(tmp_path / "store")
    assert remembered.digests(tmp_path, ["a"], known={"a": "f" * 64}) == {"a": "f" * 64}


def test_hub_blobs_carry_their_digest(tmp_path):
    from lpxbuild.pipeline.source_input import hub_digests

    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("c" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, blob in (("model.safetensors", "a" * 64), ("config.json", "b" * 40)):
        (blobs / blob).write_bytes(b"x")
        (snapshot / name).symlink_to(blobs / blob)
    assert hub_digests(snapshot, ["model.safetensors", "config.json"]) == {"model.safetensors": "a" * 64}


def test_exchange_swaps_folders_and_says_where_the_old_one_is(tmp_path):
    new, target = tmp_path / "new", tmp_path / "target"
    new.mkdir()
    (new / "n").touch()
    assert placing.exchange(new, target) is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "o").touch()
    old = placing.exchange(other, target)
    assert (target / "o").exists()
    assert (old / "n").exists()


def test_exchange_without_the_system_call(tmp_path, monkeypatch):
    import ctypes

    monkeypatch.setattr(ctypes, "CDLL", lambda *_a, **_k: object())
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    old = placing.exchange(tmp_path / "new", tmp_path / "target")
    assert (tmp_path / "target" / "new").exists()
    assert (old / "target").exists()


def test_place_file_copies_where_links_are_not_possible(tmp_path, monkeypatch):
    original = tmp_path / "a"
    original.write_bytes(b"y" * 2_000_000)
    original.chmod(0o444)
    monkeypatch.setattr(placing, "_reflink", lambda *_: False)

    def refused(*_arguments: object) -> None:
        raise OSError(errno.EXDEV, "other device")

    monkeypatch.setattr(os, "link", refused)
    assert placing.place_file(original, tmp_path / "b") == hashlib.sha256(b"y" * 2_000_000).hexdigest()
    assert (tmp_path / "b").stat().st_mode & 0o222 == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_room_errors_name_path_and_reason(tmp_path, number):
    path = str(tmp_path / "file")
    with pytest.raises(HostError) as caught, placing.room_errors(tmp_path):
        raise OSError(number, os.strerror(number), path)
    assert path in caught.value.what
    assert os.strerror(number) in caught.value.what
    assert caught.value.next


def test_other_errors_are_not_dressed_up(tmp_path):
    with pytest.raises(FileNotFoundError), placing.room_errors(tmp_path):
        (tmp_path / "absent").read_text()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LPX_CACHE", str(tmp_path / "x"))
    assert default_root() == tmp_path / "x"
    monkeypatch.delenv("LPX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "lpx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "lpx"


def test_files_of_a_killed_writer_are_swept_those_of_a_living_one_stay(tmp_path):
    import fcntl

    dead, living = tmp_path / ".tmp-a.json-1", tmp_path / ".tmp-a.json-2"
    dead.write_text("half")
    with living.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        placing.write_atomically(tmp_path / "a.json", "whole")
        assert not dead.exists()
        assert living.exists()
    assert (tmp_path / "a.json").read_text() == "whole"
    assert placing.sweep_files(tmp_path, ".tmp-*") == 1


def test_verify_as_json_lists_what_is_damaged(tmp_path):
    add(Cache(tmp_path), "engine", "aa", {"a": b"1"})
    add(Cache(tmp_path), "engine", "bb", {"b": b"1"})
    (tmp_path / "engine" / "bb" / "files" / "b").write_bytes(b"2")
    with pytest.raises(VerdictError) as caught:
        command.cache_verify(tmp_path, output=QUIET)
    (damaged,) = caught.value.as_dict()["details"]["damaged"]
    assert (damaged["stage"], damaged["key"]) == ("engine", "bb")
    assert damaged["problems"][0].startswith("b was changed")


# progress ----------------------------------------------------------------------------------------------------------


class Bars(Output):
    """Notes every bar: label → (total, bytes it was moved by)."""

    def __init__(self):
        super().__init__("quiet")
        self.bars = {}

    @contextlib.contextmanager
    def progress(self, label, total):
        moved = [0]

        def advance(count):
            moved[0] += count

        yield advance
        self.bars[label] = (total, moved[0])


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(digest, "BAR_BYTES", 1)


def test_hashing_a_source_moves_a_bar_to_its_end(tmp_path, every_size):
    (tmp_path / "a").write_bytes(b"x" * 3_000_001)
    (tmp_path / "b").write_bytes(b"x" * 10)
    output = Bars()
    digest.RememberedDigests(tmp_path / "store").digests(tmp_path, ["a", "b"], output=output)
    assert output.bars == {f"hash {tmp_path.name}": (3_000_011, 3_000_011)}


def test_verify_moves_a_bar_to_its_end(tmp_path, every_size):
    cache = Cache(tmp_path)
    add(cache, "engine", "aa", {"a": b"1" * 2_000_000})
    add(cache, "engine", "bb", {"b": b"1" * 5})
    output = Bars()
    cache.verify(output=output)
    assert output.bars == {"cache verify": (2_000_005, 2_000_005)}


def test_a_copy_moves_a_bar_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "_reflink", lambda *_: False)

    def other_disk(*_):
        raise OSError(errno.EXDEV, "other disk")

    monkeypatch.setattr(os, "link", other_disk)
    (tmp_path / "a").write_bytes(b"x" * 3_000_001)
    moved = []
    placing.place_file(tmp_path / "a", tmp_path / "b", moved.append)
    assert sum(moved) == 3_000_001


def test_a_link_counts_as_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3_000_001)
    moved = []
    placing.place_file(tmp_path / "a", tmp_path / "b", moved.append)
    assert sum(moved) == 3_000_001


def test_little_work_shows_no_bar(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    output = Bars()
    digest.RememberedDigests(tmp_path / "store").digests(tmp_path, ["a"], output=output)
    assert output.bars == {}


def on_a_terminal(place: Path, *arguments: str) -> str:
    """What `lpx` draws on a terminal of 120 columns."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxbuild", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env={**os.environ, "LPX_CACHE": str(place), "TERM": "xterm"},
    )
    os.close(terminal)
    drawn = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while block := os.read(reader, 65536):
            drawn += block
    os.close(reader)
    assert process.wait(timeout=60) == 0
    return drawn.decode(errors="replace")


def test_a_terminal_shows_bytes_up_to_the_total_and_an_estimate(tmp_path):
    add(Cache(tmp_path), "engine", "aa", {"a": bytes(96_000_000)})
    drawn = on_a_terminal(tmp_path, "cache", "verify")
    assert "cache verify" in drawn
    assert "96.0/96.0 MB" in drawn
    assert re.search(r"\d:\d\d:\d\d", drawn)
    quiet = subprocess.run(
        [sys.executable, "-m", "lpxbuild", "cache", "verify"],
        capture_output=True,
        text=True,
        env={**os.environ, "LPX_CACHE": str(tmp_path)},
        check=True,
    )
    assert "MB" not in quiet.stderr
    assert "\x1b" not in quiet.stderr
