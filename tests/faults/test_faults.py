"""Killed, interrupted, out of room, two at once: a build never leaves a half that a later one accepts."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from lpxbuild.errors import HostError
from lpxbuild.output import Output
from lpxbuild.pipeline import building, manifest
from lpxbuild.pipeline.cache import Cache
from lpxbuild.recipe import Recipe

STANDINS = Path(__file__).parents[1] / "standins"
sys.path.insert(0, str(STANDINS))
import pipeline_stages  # noqa: E402  a sibling folder, not a package

CASES = Path(__file__).parents[1] / "cases" / "data"
RECIPE = "name: tiny\nmodel: {source: model}\nparallel: {tensor: 2}\nlimits: {max_input_len: 64, max_seq_len: 96}\n"
STAGES = ("checkpoint", "engine", "repository", "smoke")


@pytest.fixture
def place(tmp_path) -> Path:
    shutil.copytree(CASES / "baseline_tp2", tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def command(place: Path, *arguments: str, real: bool = False) -> list[str]:
    program = ["-m", "lpxbuild"] if real else [str(STANDINS / "pipeline_stages.py")]
    return [
        sys.executable,
        *program,
        "build",
        str(place / "recipe.yaml"),
        "--build-dir",
        str(place / "build"),
        *arguments,
    ]


def environment(place: Path, **extra: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return os.environ | {"LPX_CACHE": str(place / "cache"), "PYTHONPATH": root} | extra


def lpx(place: Path, *arguments: str, real: bool = False, prefix: tuple[str, ...] = (), **extra: str):
    return subprocess.run(
        [*prefix, *command(place, *arguments, real=real)],
        env=environment(place, **extra),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def stop_in(place: Path, stage: str, number: int, *arguments: str) -> tuple[int, str]:
    """Start a build, send a signal in the middle of a stage; returns (exit status, stderr)."""
    process = subprocess.Popen(
        command(place, *arguments),
        env=environment(place, LPX_TEST_WAIT=stage),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        if line.startswith(f"AT {stage}"):
            break
    process.send_signal(number)
    said += process.stderr.read()
    return process.wait(timeout=60), said


def leftovers(place: Path) -> list[Path]:
    return list(place.rglob(".tmp-*"))


def contents(place: Path) -> dict[str, bytes]:
    view = place / "build" / "tiny"
    return {
        path.relative_to(view).as_posix(): path.read_bytes()
        for part in ("checkpoint", "engine", "repository")
        for path in sorted((view / part).rglob("*"))
        if path.is_file()
    }


def assert_nothing_lies(place: Path) -> None:
    """Everything under a final name is whole; a manifest that can be read does not vouch for other bytes."""
    for folder in (place / "cache").glob("*/*/files"):
        if folder.parent.name.startswith(".tmp-"):
            continue
        assert (folder.parent / "artifact.json").is_file(), folder
    for verdict in Cache(place / "cache").verify(output=Output.quiet()):
        assert verdict.problems == (), verdict
    view = place / "build" / "tiny"
    if (view / "manifest.json").exists():
        found = manifest.read(view)
        assert bool(manifest.differences(view, found)) == bool(manifest.differences(view, found, full=True))


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        *((stage, number) for stage in STAGES for number in (signal.SIGKILL, signal.SIGINT)),
        ("checkpoint", signal.SIGTERM),
    ],
)
def test_stopped_in_a_stage_nothing_half_made_stays_and_the_next_run_succeeds(place, stage, number):
    status, said = stop_in(place, stage, number)
    if number == signal.SIGKILL:
        assert status == -9
    else:
        assert status == 128 + number
        assert said.count("error:") == 1
        assert "Traceback" not in said
        assert leftovers(place) == []
    assert not list((place / "cache" / stage).glob("[0-9a-f]*"))
    assert not (place / "build" / "tiny" / "manifest.json").exists()
    assert_nothing_lies(place)
    again = lpx(place)
    assert again.returncode == 0, again.stderr
    assert "proven" in again.stdout
    assert leftovers(place) == []
    assert sorted({name.split("/")[0] for name in contents(place)}) == ["checkpoint", "engine", "repository"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_good_earlier_result_survives_a_stopped_rebuild(place, number):
    assert lpx(place).returncode == 0
    good = contents(place)
    record = (place / "build" / "tiny" / "manifest.json").read_bytes()
    stop_in(place, "engine", number, "--set", "parallel.tensor=1")
    assert contents(place) == good
    assert (place / "build" / "tiny" / "manifest.json").read_bytes() == record
    stop_in(place, "checkpoint", number, "--force")
    assert contents(place) == good
    assert lpx(place).stdout.startswith(f"{place / 'build' / 'tiny'}: proven (nothing to do)")


def test_file_size_limit_in_the_real_converter(place):
    """`prlimit --fsize=65536`: the rank files of baseline are larger."""
    limited = lpx(place, "--to", "checkpoint", real=True, prefix=("prlimit", "--fsize=65536"))
    assert limited.returncode == 3, limited.stderr
    assert "rank" in limited.stderr
    assert "too large" in limited.stderr.lower()
    assert "Traceback" not in limited.stderr
    assert leftovers(place) == []
    assert list((place / "cache").glob("checkpoint/*")) == []
    assert lpx(place, "--to", "checkpoint", real=True).returncode == 0
    # A failed re-run leaves the good result.
    good = contents(place)
    assert good
    assert lpx(place, "--force", "--to", "checkpoint", real=True, prefix=("prlimit", "--fsize=65536")).returncode == 3
    assert contents(place) == good


@pytest.mark.parametrize("stage", ["checkpoint", "engine"])
def test_file_size_limit_in_any_stage(place, stage):
    if stage == "engine":
        assert lpx(place, "--to", "checkpoint").returncode == 0
    limited = lpx(place, prefix=("prlimit", "--fsize=700000"))
    assert limited.returncode == 3
    assert "File too large" in limited.stderr
    assert str(place / "cache" / stage) in limited.stderr
    assert leftovers(place) == []
    assert lpx(place).returncode == 0


@pytest.fixture
def small_disk(tmp_path_factory):
    """A tmpfs of 24 MB, where this user may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_in_a_stage(place, small_disk):
    full = lpx(place, "--cache-dir", str(small_disk / "cache"), LPX_TEST_PAYLOAD=str(14 << 20))
    assert full.returncode == 3, full.stderr
    assert "No space left on device" in full.stderr
    assert str(small_disk) in full.stderr
    assert "Traceback" not in full.stderr
    assert list(small_disk.rglob(".tmp-*")) == []
    assert not (place / "build" / "tiny" / "manifest.json").exists()
    (small_disk / "filler").write_bytes(b"\0" * (12 << 20))
    early = lpx(place, "--cache-dir", str(small_disk / "cache"))
    assert early.returncode == 3
    assert "needed" in early.stderr  # refused before it is begun
    assert "free" in early.stderr
    (small_disk / "filler").unlink()
    assert lpx(place, "--cache-dir", str(small_disk / "cache")).returncode == 0


def test_a_full_disk_under_the_build_folder_keeps_the_earlier_view(place, small_disk):
    build = ("--build-dir", str(small_disk / "build"))
    assert lpx(place, *build).returncode == 0
    view = small_disk / "build" / "tiny"
    good = (view / "checkpoint" / "rank0.safetensors").read_bytes()
    record = (view / "manifest.json").read_bytes()
    room = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(b"\0" * (room - 100_000))
    full = lpx(place, *build, "--set", "model.dtype=float32")
    assert full.returncode == 3, full.stderr
    assert "free" in full.stderr
    assert (view / "checkpoint" / "rank0.safetensors").read_bytes() == good
    assert (view / "manifest.json").read_bytes() == record
    assert list(small_disk.rglob(".tmp-*")) == []
    (small_disk / "filler").unlink()
    assert lpx(place, *build, "--set", "model.dtype=float32").returncode == 0
    assert lpx(place, *build, "--set", "model.dtype=float32").stdout.endswith("serve " + str(view) + "\n")


def test_a_read_only_cache_is_one_clear_message(place):
    if os.geteuid() == 0:
        # Nothing is read-only for root; a file in the place of the folder is a wrong option.
        (place / "cache").write_text("a file where the folder should be")
        failed = lpx(place)
        assert failed.returncode == 2, failed.stderr
    else:
        (place / "cache").mkdir(mode=0o555)
        failed = lpx(place)
        assert failed.returncode == 3, failed.stderr
    assert str(place / "cache") in failed.stderr
    assert "Traceback" not in failed.stderr


def test_two_processes_build_the_same_thing_once(place):
    """The second waits, says so, and takes what the first made."""
    first = subprocess.Popen(
        command(place),
        env=environment(place, LPX_TEST_WAIT="engine"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("AT engine"):
            break
    second = subprocess.Popen(
        command(place), env=environment(place), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert second.stderr is not None
    for line in second.stderr:
        if "waiting for it" in line:
            break
    else:
        pytest.fail("the second build did not say that it waits")
    assert leftovers(place)  # the first one's work is untouched
    first.kill()
    first.wait()
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "re-used checkpoint" in output
    assert leftovers(place) == []


@pytest.mark.parametrize("fault", ["flip", "same size", "edit", "delete"])
def test_damage_between_two_real_builds(place, fault):
    """The whole command line with the real converter."""
    assert lpx(place, "--to", "checkpoint", real=True).returncode == 0
    good = contents(place)
    folder = place / "build" / "tiny" / "checkpoint"
    rank = folder / "rank1.safetensors"
    if fault == "flip":
        status = rank.stat()
        data = bytearray(rank.read_bytes())
        data[-7] ^= 1
        rank.chmod(0o644)
        rank.write_bytes(data)
        os.utime(rank, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif fault == "same size":
        rank.write_bytes(os.urandom(rank.stat().st_size))
    elif fault == "edit":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 1}))
    else:
        rank.unlink()
    again = lpx(place, "--to", "checkpoint", real=True)
    assert again.returncode == 0
    assert ("config.json" if fault == "edit" else "rank1.safetensors") in again.stderr
    assert contents(place) == good
    assert lpx(place, "--to", "checkpoint", real=True).stderr == ""


class Campaign:
    """Builds in forked children that end or fail at the N-th touch of the file system."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        pipeline_stages.install(monkeypatch)

    def build(self, *overrides: str) -> building.BuildResult:
        return building.build(
            Recipe.load(self.place / "recipe.yaml", list(overrides)),
            recipe_path=self.place / "recipe.yaml",
            cache_dir=self.place / "cache",
            build_dir=self.place / "build",
            output=Output.quiet(),
        )

    def count(self, *overrides: str) -> int:
        """Touches of a whole build."""
        reader, writer = os.pipe()
        if os.fork() == 0:
            seen = [0]
            sys.addaudithook(lambda event, _args: seen.__setitem__(0, seen[0] + _touches(event)))
            self.build(*overrides)
            os.write(writer, str(seen[0]).encode())
            os._exit(0)
        os.close(writer)
        os.wait()
        with os.fdopen(reader) as answer:
            return int(answer.read())

    def killed_at(self, number: int, *overrides: str) -> None:
        """A build whose process is gone, without any clean-up, at touch `number`."""
        if os.fork() == 0:
            left = [number]

            def hook(event: str, _arguments: object) -> None:
                if _touches(event):
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            self.build(*overrides)
            os._exit(0)
        os.wait()

    def full_at(self, number: int, *overrides: str) -> int:
        """A build for which the disk is full from write `number` on; returns its exit status."""
        pid = os.fork()
        if pid == 0:
            left = [number]

            def hook(event: str, arguments: tuple[object, ...]) -> None:
                mode = arguments[1] if event == "open" else ""
                grows = event in ("os.mkdir", "os.link") or (isinstance(mode, str) and set(mode) & set("wxa+"))
                left[0] -= bool(grows)
                if left[0] < 0 and grows:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

            sys.addaudithook(hook)
            try:
                self.build(*overrides)
            except HostError as error:
                os._exit(3 if "No space left" in error.what else 70)
            except BaseException:
                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _touches(event: str) -> bool:
    return event != "os.kill" and (event == "open" or event.startswith(("os.", "shutil.", "ctypes.", "fcntl.")))


def campaign(place: Path, monkeypatch: pytest.MonkeyPatch, every: int | None) -> None:
    """Kill at many points of a first build and of a rebuild with another recipe; None takes every point."""
    tests = Campaign(place, monkeypatch)
    change = "limits.max_input_len=32"
    reference, other = place / "reference", place / "other"
    for target, overrides in ((reference, ()), (other, (change,))):
        tests.build(*overrides)
        target.mkdir()
        (place / "build").rename(target / "build")
        shutil.rmtree(place / "cache")
    expected, changed = (contents(folder) for folder in (reference, other))
    total = tests.count()
    shutil.rmtree(place / "cache")
    shutil.rmtree(place / "build")
    assert total > 100
    points = range(total) if every is None else sorted(random.Random(2).sample(range(total), every))
    for point in points:
        tests.killed_at(point)
        assert_nothing_lies(place)
        assert tests.build().state == "proven"
        assert contents(place) == expected, point
        assert leftovers(place) == [], point
        # A rebuild with another recipe over a good result, killed at the same point.
        tests.killed_at(point, change)
        assert_nothing_lies(place)
        assert len([v for v in Cache(place / "cache").verify(output=Output.quiet()) if v.stage == "checkpoint"]) == 1
        result = tests.build(change)
        assert (result.state, contents(place)) == ("proven", changed), point
        assert not (place / "build" / "tiny" / "kept").exists(), point
        assert leftovers(place) == [], point
        shutil.rmtree(place / "cache")
        shutil.rmtree(place / "build")


def test_killed_at_some_touches_of_the_file_system(place, monkeypatch):
    campaign(place, monkeypatch, 8)


@pytest.mark.full
def test_killed_at_every_touch_of_the_file_system(place, monkeypatch):
    campaign(place, monkeypatch, None)


def disk_campaign(place: Path, monkeypatch: pytest.MonkeyPatch, points: range) -> int:
    """Fill the disk at each point; returns at how many of them the build failed."""
    tests = Campaign(place, monkeypatch)
    failed = 0
    for point in points:
        status = tests.full_at(point)
        assert status in (0, 3), point
        failed += status == 3
        assert leftovers(place) == [], point
        assert_nothing_lies(place)
        assert tests.build().state == "proven"
        shutil.rmtree(place / "cache", ignore_errors=True)
        shutil.rmtree(place / "build", ignore_errors=True)
        if status == 0:
            break
    return failed


def test_disk_full_from_some_writes_on(place, monkeypatch):
    assert disk_campaign(place, monkeypatch, range(0, 60, 9)) >= 5


@pytest.mark.full
def test_disk_full_from_every_write_on(place, monkeypatch):
    assert disk_campaign(place, monkeypatch, range(1000)) > 30


def test_a_killed_builds_lock_does_not_block(place):
    stop_in(place, "engine", signal.SIGKILL)
    started = time.monotonic()
    assert lpx(place).returncode == 0
    assert time.monotonic() - started < 30
