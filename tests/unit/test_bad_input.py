"""Whatever a user types, pipes or points at ends in one clear message with the right exit status, never in a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lpxbuild.errors import HostError, LpxError, RecipeError, UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import command, lock
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.first_recipe import write_first_recipe
from lpxbuild.pipeline.inspection import inspect_path
from lpxbuild.recipe.loading import load, parse

BASELINE = Path(__file__).parent.parent / "cases" / "data" / "baseline"
SMALL = "name: tiny\nmodel: {source: here}\n"
LPX = f"{sys.executable} -m lpxbuild"


def shell(line: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        cwd=cwd,
        check=False,
        timeout=60,
        env={**os.environ, "LPX": LPX, "LPX_CACHE": str(cwd / "cache"), **environment},
    )


# --json -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "build",
        "build a.yaml --bogus",
        "nope",
        "build a.yaml extra",
        "cache prune --older-than x",
        "serve . --http-port x",
        "serve . --http-port 70000",
    ],
)
def test_a_wrong_command_line_is_a_document_too(tmp_path: Path, arguments: str) -> None:
    done = shell(f"{LPX} {arguments} --json", tmp_path)
    document = json.loads(done.stdout)
    assert (document["error"], document["exit_code"], done.returncode) == ("UsageError", 2, 2)
    assert document["what"]
    assert "-h" in document["next"]


def test_json_is_json_whatever_bytes_a_name_has(tmp_path: Path) -> None:
    for locale in ("C.UTF-8", "C", "POSIX"):
        done = shell(f"{LPX} build $'a\\xff\\xc3\\xa9.yaml' --json", tmp_path, LC_ALL=locale)
        assert done.returncode == 2
        assert "does not exist" in json.loads(done.stdout)["what"]
    done = shell(f"{LPX} build $'\\xf0\\x9f\\x98\\x80\\xc3\\xa9.yaml' --json", tmp_path, PYTHONIOENCODING="latin-1")
    assert "\U0001f600é.yaml" in json.loads(done.stdout)["what"]


def test_a_message_is_printed_in_any_encoding(tmp_path: Path) -> None:
    done = shell(f"{LPX} build $'a\\xff.yaml'", tmp_path, PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 2
    assert b"does not exist" in done.stderr
    assert b"Traceback" not in done.stderr


# stdout and stderr ------------------------------------------------------------------------------------------------


def test_closed_streams_change_no_exit_status(tmp_path: Path) -> None:
    assert shell(f"{LPX} recipes >&-", tmp_path).returncode == 0
    assert shell(f"{LPX} recipes --json >&- 2>&-", tmp_path).returncode == 0
    for closed in ("2>&-", "2>/dev/full", "<&- >&- 2>&-", "--json >&- 2>&-"):
        assert shell(f"{LPX} build nope.yaml {closed}", tmp_path).returncode == 2


def test_a_result_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    for options in ("", "--json"):
        done = shell(f"{LPX} recipes {options} >/dev/full", tmp_path)
        assert done.returncode == 3
        assert done.stderr.decode().startswith("error: the result cannot be written to stdout")
        assert b"Traceback" not in done.stderr
        assert b"Exception" not in done.stderr


def test_a_reader_that_went_away_hides_no_failure(tmp_path: Path) -> None:
    """`lpx … | head`: a result nobody reads is fine, a failure after it is still one."""
    done = shell(f"set -o pipefail; ({LPX} recipes; echo $? >status) | true; cat status", tmp_path)
    assert done.stdout.split()[-1] == b"0"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        output = Output("human", stdout=gone, stderr=gone)
        output.result({}, "x" * 100_000)
        output.step("goes on")
        output.error(UsageError("what"))
        output.result({}, "more")


# recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x\na: &a [*a]\n", "r.yaml:2"),
        ("name: x\na: &a {b: *a}\n", "r.yaml:2"),
        ("name: " + "[" * 5000 + "]" * 5000, "nested"),
        (
            "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)),
            "too large",
        ),
        ("name: x\n? [a, b]\n: 1\n", "r.yaml:2"),
        ("name: ${NAME\nmodel: {source: x}\n", "r.yaml:1"),
        ("name: x\nmodel: {source: x}\nparallel:\n  tensor: ${BROKEN}\n", "r.yaml:4"),
    ],
)
def test_strange_yaml_is_refused_by_line(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv("BROKEN", "{a: [")
    with pytest.raises(RecipeError) as caught:
        parse(text, "r.yaml", [])
    assert words in str(caught.value)
    assert "Node(" not in str(caught.value)


def test_an_alias_is_still_fine() -> None:
    assert parse("name: &n tiny\nmodel: {source: *n}\n", "r.yaml", []).model.source == "tiny"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("limits.max_batch_size=99999999999999999999", "less than or equal to 2147483647"),
        ("runtime.kv_cache_gib=.inf", "finite"),
        ("runtime.kv_cache_gib=.nan", "finite"),
        ("paralel.tensor=2", "--set paralel.tensor=2"),
        ("parallel.tensor.x=2", "--set parallel.tensor.x=2"),
        ("parallel=2", "keys below it: tensor, pipeline"),
        ("model=", "is empty"),
        ("name=[1", "not valid YAML"),
        ("name=a\udcff", "not valid YAML"),
    ],
)
def test_a_wrong_override_names_itself_and_what_is_valid(override: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(SMALL, "r.yaml", [override])
    assert words in str(caught.value)
    assert "instance of" not in str(caught.value)
    assert "\n  in " not in str(caught.value)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "broken.yaml").symlink_to("away.yaml")
    for name, words in (("pipe.yaml", "not a file"), ("folder.yaml", "folder"), ("broken.yaml", "away.yaml")):
        with pytest.raises(RecipeError, match=words):
            load(tmp_path / name, [])


def test_names_that_no_file_system_takes(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(SMALL)
    long = "x" * 300
    for arguments in (
        f"build {long}.yaml",
        f"inspect {long}",
        f"init {long}",
        f"build r.yaml --set model.source={long}",
    ):
        done = shell(f"{LPX} {arguments} --json", tmp_path)
        assert done.returncode == 2, done.stderr
        assert "File name too long" in json.loads(done.stdout)["what"]


def test_a_shipped_recipe_is_found_by_its_beginning() -> None:
    with pytest.raises(LpxError, match="lpx recipes smollm2-135m-int8-tp3"):
        command.recipe_file("smollm2")


# inspect ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"), [("ensemble/config.pbtxt", "garbage {{"), ("engine.json", "{"), ("engine.json", "[]")]
)
def test_broken_files_are_named_by_inspect(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        inspect_path(tmp_path, output=Output.quiet())


# init -------------------------------------------------------------------------------------------------------------


def test_init_writes_through_a_link_and_never_over_a_device_or_folder(tmp_path: Path) -> None:
    """A rename onto /dev/stdout would replace the link for everybody."""
    device = tmp_path / "device"
    device.symlink_to("/dev/null")
    target = tmp_path / "real.yaml"
    target.write_text("old")
    link = tmp_path / "link.yaml"
    link.symlink_to("real.yaml")
    for path in (device, tmp_path):
        with pytest.raises(UsageError, match="not a file"):
            write_first_recipe(str(BASELINE), path, revision=None, force=True, output=Output.quiet())
    assert device.readlink() == Path("/dev/null")
    write_first_recipe(str(BASELINE), link, revision=None, force=True, output=Output.quiet())
    assert link.is_symlink()
    assert target.read_text().startswith("# yaml-language-server")


# cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        "--older-than -1",
        "--older-than nan",
        "--max-size inf",
        "--max-size nan",
        "--max-size -5",
        "--all --max-size 5",
        "--all --older-than 1",
    ],
)
def test_prune_refuses_limits_that_are_none(tmp_path: Path, options: str) -> None:
    done = shell(f"{LPX} cache prune {options} --json", tmp_path)
    assert done.returncode == 2, done.stderr
    assert options.split()[0] in json.loads(done.stdout)["what"]


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a folder"):
        Cache(tmp_path / "file")


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"name: tiny\nmodel: {{source: {BASELINE}}}\n")
    for option in ("--build-dir /proc/x", "--cache-dir /proc/x"):
        done = shell(f"{LPX} build r.yaml --to source {option} --json", tmp_path)
        assert done.returncode == 3, done.stderr
        assert "/proc/x" in json.loads(done.stdout)["what"]


# serve ------------------------------------------------------------------------------------------------------------


def test_an_empty_address_is_refused(tmp_path: Path) -> None:
    done = shell(f"{LPX} serve . --address '' --json", tmp_path)
    assert (done.returncode, json.loads(done.stdout)["what"]) == (2, "--address is empty")


def test_one_port_for_two_services_is_refused(tmp_path: Path) -> None:
    for ports in ("--http-port 9100 --grpc-port 9100", "--http-port 8002"):
        done = shell(f"{LPX} serve . {ports} --json", tmp_path)
        assert done.returncode == 2
        assert "are both" in json.loads(done.stdout)["what"]


# smoke ------------------------------------------------------------------------------------------------------------


def test_a_failed_smoke_test_is_one_document(tmp_path: Path) -> None:
    done = shell(f"{LPX} smoke 127.0.0.1:1 --json", tmp_path)
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (1, False)
    assert b"error: the smoke test of 127.0.0.1:1 failed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("127.0.0.1:99999", 2, "127.0.0.1:99999"),
        ("127.0.0.1:65535", 2, "65536"),
        ("127.0.0.1:1 --grpc bad", 2, "--grpc bad"),
        ("127.0.0.1:1 --grpc h:99999", 2, "--grpc h:99999"),
        ("127.0.0.1:1 --junit /tmp", 2, "--junit /tmp"),
        ("127.0.0.1:1 --junit /proc/x.xml", 3, "--junit /proc/x.xml"),
    ],
)
def test_wrong_addresses_and_report_files(tmp_path: Path, arguments: str, status: int, words: str) -> None:
    done = shell(f"{LPX} smoke {arguments} --json", tmp_path)
    assert done.returncode == status
    assert json.loads(done.stdout)
    assert words in done.stderr.decode()


def test_a_report_that_finds_no_room_leaves_no_half(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("<earlier/>")
    done = shell(f"ulimit -f 0; {LPX} smoke 127.0.0.1:1 --junit report.xml", tmp_path)
    assert done.returncode == 3, done.stderr
    assert b"--junit report.xml cannot be written" in done.stderr
    assert report.read_text() == "<earlier/>"
    assert [path.name for path in tmp_path.iterdir()] == ["report.xml"]


def test_disk_messages_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lpxbuild.pipeline import host

    monkeypatch.setattr(host, "free_bytes", lambda _folder: 10_000_000)
    with pytest.raises(HostError, match=r"about 16\.8 MB of disk needed, 10\.0 MB free"):
        host.check_disk(tmp_path, 1000, "checkpoint")


# what lies in folders of lpx --------------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder with a recipe, its lock, a build to the checkpoint and its cache."""
    (tmp_path / "r.yaml").write_text(f"name: tiny\nmodel: {{source: {BASELINE}}}\n")
    assert shell(f"{LPX} build r.yaml --to checkpoint -q", tmp_path).returncode == 0
    return tmp_path


def test_something_kept_under_a_folders_name_blocks_no_later_build(built: Path) -> None:
    folder = built / "build" / "tiny" / "checkpoint"
    folder.rename(built / "aside")
    folder.write_text("mine")
    again = f"{LPX} build r.yaml --to checkpoint --json"
    assert shell(again, built).returncode == 0
    (folder / "notes.txt").write_text("mine too")
    assert shell(again, built).returncode == 0
    kept = built / "build" / "tiny" / "kept"
    assert (kept / "checkpoint").read_text() == "mine"
    assert (kept / "checkpoint.1" / "notes.txt").read_text() == "mine too"


@pytest.mark.parametrize("name", ["cache/digests", "cache/locks", "build/tiny/.lock"])
def test_something_else_in_the_place_of_a_folder_or_lock(built: Path, name: str) -> None:
    path = built / name
    shell(f"rm -r {path}", built)
    if path.name == ".lock":
        path.mkdir()
    else:
        path.write_text("")
    for line in ("build r.yaml --to checkpoint --force", *(["cache verify"] if name == "cache/locks" else [])):
        done = shell(f"{LPX} {line} --json", built)
        assert done.returncode == 3, done.stderr
        assert str(path) in json.loads(done.stdout)["what"]
        assert "in the way" in json.loads(done.stdout)["next"]


def test_endless_json_in_every_file_of_lpx(built: Path) -> None:
    """Nesting beyond Python's limit is a RecursionError, no ValueError."""
    deep = "[" * 100_000
    files = [built / "build" / "tiny" / "manifest.json"]
    files += [path for path in (built / "cache").rglob("*.json") if "files" not in path.parts]
    assert len(files) >= 3
    for path in files:
        path.write_text(deep)
    assert shell(f"{LPX} inspect build/tiny", built).returncode == 2
    assert shell(f"{LPX} cache ls", built).returncode == 0
    assert shell(f"{LPX} cache verify", built).returncode == 1
    assert shell(f"{LPX} build r.yaml --to checkpoint", built).returncode == 0
    assert shell(f"{LPX} cache verify", built).returncode == 0
    assert shell(f"{LPX} inspect build/tiny", built).returncode == 0


@pytest.mark.parametrize("text", ["garbage", "[]", "", "{", "format_version: 1", "[" * 5000, "format_version: 9"])
def test_a_broken_lock_is_named_in_plain_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.lock").write_text(text)
    with pytest.raises(UsageError, match="cannot be read as a lock file") as caught:
        lock.read(tmp_path / "r.lock")
    assert "Error" not in caught.value.why
    assert "\n" not in caught.value.why


# signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stop_that_an_import_turned_into_an_error_is_still_a_stop(tmp_path: Path, name: str, status: int) -> None:
    """numpy's C code answers an exception during its import with an ImportError of its own."""
    code = (
        "import os, signal\n"
        "from lpxbuild.cli.running import running\n"
        "with running(json=True, quiet=False):\n"
        f"    try: os.kill(os.getpid(), signal.{name}); signal.pause()\n"
        "    except BaseException: pass\n"
        "    raise ImportError('numpy._core.umath failed to import')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    assert json.loads(done.stdout)["what"] == f"stopped by {name}"


def test_an_interrupt_before_the_command_runs_shows_no_traceback() -> None:
    code = (
        "import sys, types\n"
        "class Cli(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        if name == 'app': raise KeyboardInterrupt\n"
        "        raise AttributeError(name)\n"
        "import lpxbuild\n"
        "sys.modules['lpxbuild.cli'] = Cli('lpxbuild.cli')\n"
        "from lpxbuild.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "error: stopped by SIGINT\n")


# the operating system ---------------------------------------------------------------------------------------------


def test_errors_keep_their_class() -> None:
    from lpxbuild.errors import of_the_system

    assert isinstance(of_the_system(OSError(28, "x", "f")), HostError)
    assert isinstance(of_the_system(OSError(13, "x", "f")), UsageError)
    assert isinstance(of_the_system(MemoryError()), HostError)
    assert of_the_system(OSError(2, "x", "f")) is None
    assert of_the_system(ValueError()) is None
