"""The pipeline with stand-in stages: what runs again, what the build folder shows, what it says."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from lpxbuild.errors import HostError, RecipeError, SourceError, UsageError, VerdictError
from lpxbuild.output import Output
from lpxbuild.pipeline import building, evidence, explaining, manifest
from lpxbuild.pipeline.cache import Cache
from lpxbuild.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))
import pipeline_stages

CASES = Path(__file__).parents[1] / "cases" / "data"
ALL = ["checkpoint", "engine", "repository", "smoke"]


class House:
    """A recipe beside its source, a cache and a build folder below one temporary folder."""

    def __init__(self, folder: Path, ran: list[str]) -> None:
        self.folder = folder
        self.ran = ran
        self.cache = folder / "cache"
        self.source = folder / "model"
        shutil.copytree(CASES / "baseline_tp2", self.source)
        self.recipe_path = folder / "recipe.yaml"
        self.recipe_path.write_text(
            "name: tiny\nmodel: {source: model}\nparallel: {tensor: 2}\nsmoke: {prompts: [{text: hello}]}\n"
        )
        self.view = folder / "build" / "tiny"
        self.output = Output.quiet()

    def build(self, *overrides: str, **options):
        self.ran.clear()
        self.output = Output.quiet()
        recipe = Recipe.load(self.recipe_path, list(overrides))
        return building.build(
            recipe,
            recipe_path=self.recipe_path,
            cache_dir=self.cache,
            build_dir=self.folder / "build",
            output=self.output,
            **options,
        )

    def why(self, *overrides: str, **options):
        recipe = Recipe.load(self.recipe_path, list(overrides))
        return explaining.why(
            recipe, recipe_path=self.recipe_path, cache_dir=self.cache, build_dir=self.folder / "build", **options
        )

    def contents(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.view).as_posix(): path.read_bytes()
            for part in ("checkpoint", "engine", "repository")
            for path in sorted((self.view / part).rglob("*"))
            if path.is_file()
        }

    def leftovers(self) -> list[Path]:
        return list(self.folder.rglob(".tmp-*"))

    def said(self) -> str:
        return "\n".join(self.output.notices)


@pytest.fixture
def house(tmp_path, monkeypatch) -> House:
    return House(tmp_path, pipeline_stages.install(monkeypatch))


def flip_byte(path: Path, *, offset: int = 1000) -> None:
    """Change one byte and put the mtime back, as bit rot or a careful attacker would."""
    status = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_build_runs_every_stage_once_and_is_proven(house):
    first = house.build()
    assert house.ran == ALL
    assert first.state == "proven"
    assert sorted(house.contents()) == [
        "checkpoint/config.json",
        "checkpoint/rank0.safetensors",
        "checkpoint/rank1.safetensors",
        "engine/engine.json",
        "engine/openvino_model.bin",
        "repository/tensorrt_llm/1/engine/engine.json",
        "repository/tensorrt_llm/1/engine/openvino_model.bin",
        "repository/tensorrt_llm/config.pbtxt",
    ]
    written = (house.view / "manifest.json").read_bytes()
    second = house.build()
    assert (house.ran, second.state, second.made) == ([], "proven", ())
    assert (house.view / "manifest.json").read_bytes() == written
    assert house.leftovers() == []
    assert json.loads((house.view / "evidence" / "smoke.json").read_text())["digest"]
    assert (house.view / "recipe.yaml").read_text() == house.recipe_path.read_text()


def test_unchanged_files_are_not_read_again(house, monkeypatch):
    time.sleep(0.06)  # a file that is younger than a tick of the clock is not trusted
    house.build()
    from lpxbuild.pipeline import digest, workspace

    def fail(path, _advance=None):
        raise AssertionError(f"{path} was hashed")

    monkeypatch.setattr(digest, "sha256_file", fail)
    monkeypatch.setattr(workspace, "sha256_file", fail)
    assert house.build().state == "proven"


def test_large_files_are_read_only_and_share_the_cache_small_ones_are_copies(house):
    house.build()
    cached = {path.stat().st_ino for path in house.cache.rglob("*") if path.is_file()}
    rank, config = house.view / "checkpoint" / "rank0.safetensors", house.view / "checkpoint" / "config.json"
    assert rank.stat().st_mode & 0o222 == 0
    assert rank.stat().st_ino in cached or rank.stat().st_nlink == 1  # a reflink has an inode of its own
    assert config.stat().st_ino not in cached
    assert config.stat().st_mode & 0o200


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("quantization.format=int8_wo", None),
        ("parallel.tensor=1", ALL),
        ("limits.max_input_len=512", ["engine", "repository", "smoke"]),
        ("serve.streaming=false", ["repository", "smoke"]),
        ("smoke.prompts.0.max_tokens=3", ["smoke"]),
        ("serve.drain_seconds=31", ["smoke"]),
    ],
)
def test_a_changed_field_runs_what_reads_it_and_what_follows(house, override, expected):
    house.build()
    if expected is None:
        with pytest.raises(SourceError, match="int8_wo"):  # 64 x ranks does not divide this tiny model
            house.build(override)
        return
    house.build(override)
    assert house.ran == expected
    house.build()  # and back: everything is still in the cache
    assert house.ran == []


def test_a_changed_source_file_runs_everything_again(house):
    house.build()
    flip_byte(house.source / "model-00001-of-00002.safetensors", offset=-1 + 4000)
    plan = house.why()
    assert "model-00001-of-00002.safetensors: " in plan.text()
    house.build()
    assert house.ran == ALL


def test_a_touched_source_file_is_hashed_and_nothing_runs(house):
    house.build()
    (house.source / "config.json").touch()
    house.build()
    assert house.ran == []


def test_changed_code_of_a_stage_is_an_input(house, monkeypatch):
    house.build()
    from lpxbuild.pipeline import keys

    same = keys.code
    monkeypatch.setattr(keys, "code", lambda room: "0" * 40 if room == "repository" else same(room))
    assert "code of repository" in house.why().text()
    house.build()
    assert house.ran == ["repository"]  # its bytes are the same, so the proof still is of them


def test_a_file_edited_in_the_build_folder_is_said_and_kept_aside(house):
    house.build()
    good = house.contents()
    config = house.view / "repository" / "tensorrt_llm" / "config.pbtxt"
    config.write_text("decoupled: maybe\n")
    result = house.build()
    assert house.ran == []
    assert result.state == "proven"
    assert house.contents() == good
    kept = house.view / "kept" / "repository" / "tensorrt_llm" / "config.pbtxt"
    assert kept.read_text() == "decoupled: maybe\n"
    assert "config.pbtxt was changed by hand" in house.said()
    config.write_text("decoupled: never\n")
    house.build()
    assert kept.with_name("config.pbtxt.1").read_text() == "decoupled: never\n"
    assert kept.read_text() == "decoupled: maybe\n"


def test_a_foreign_file_is_said_and_kept_aside(house):
    house.build()
    (house.view / "engine" / "plugin.so").write_text("x")
    house.build()
    assert not (house.view / "engine" / "plugin.so").exists()
    assert (house.view / "kept" / "engine" / "plugin.so").read_text() == "x"
    assert "does not belong there" in house.said()


def test_files_that_python_writes_while_serving_are_no_change(house):
    house.build()
    folder = house.view / "repository" / "tensorrt_llm" / "1" / "__pycache__"
    folder.mkdir()
    (folder / "model.cpython-311.pyc").write_bytes(b"x")
    house.build()
    assert house.output.notices == [] or "pyc" not in house.said()
    assert (folder / "model.cpython-311.pyc").exists()


@pytest.mark.parametrize("damage", ["flip", "overwrite"])
@pytest.mark.parametrize("place", ["view", "cache"])
def test_a_damaged_large_file_is_found_by_its_ctime_and_made_again(house, damage, place):
    house.build()
    good = house.contents()
    if place == "view":
        path = house.view / "checkpoint" / "rank1.safetensors"
    else:
        path = next(house.cache.glob("checkpoint/*/files/rank1.safetensors"))
    if damage == "flip":
        flip_byte(path)
    else:
        path.chmod(0o644)
        path.write_bytes(b"\0" * path.stat().st_size)
    result = house.build()
    assert result.state == "proven"
    assert house.contents() == good
    assert "rank1.safetensors" in house.said()
    for verdict in Cache(house.cache).verify(output=Output.quiet()):
        assert verdict.problems == ()
    assert "smoke" not in house.ran  # the same bytes keep their proof


def test_a_damaged_engine_in_the_repository_is_made_again(house):
    house.build()
    good = house.contents()
    flip_byte(house.view / "repository" / "tensorrt_llm" / "1" / "engine" / "openvino_model.bin")
    house.build()
    assert house.contents() == good
    assert "openvino_model.bin" in house.said()
    assert house.build().made == ()


def test_a_deleted_rank_file_is_restored_and_said(house):
    house.build()
    good = house.contents()
    (house.view / "checkpoint" / "rank1.safetensors").unlink()
    house.build()
    assert "checkpoint/rank1.safetensors was missing" in house.said()
    assert house.contents() == good
    next(house.cache.glob("checkpoint/*/files/rank1.safetensors")).unlink()
    house.build()
    assert "rank1.safetensors is missing" in house.said()
    assert house.ran == ["checkpoint"]
    assert house.contents() == good


def test_a_silently_rotten_checkpoint_is_hashed_before_an_engine_is_compiled_from_it(house):
    house.build(to="checkpoint")
    folder = next(house.cache.glob("checkpoint/*"))
    rank = folder / "files" / "rank0.safetensors"
    flip_byte(rank)
    # As a failing disk does it: the record's times are those of the damaged file.
    record = json.loads((folder / "artifact.json").read_text())
    status = rank.stat()
    record["files"]["rank0.safetensors"] |= {"ctime_ns": status.st_ctime_ns, "mtime_ns": status.st_mtime_ns}
    (folder / "artifact.json").write_text(json.dumps(record))
    house.build()
    assert "rank0.safetensors was changed" in house.said()
    assert house.ran == ALL
    assert not any(verdict.problems for verdict in Cache(house.cache).verify(output=Output.quiet()))


def test_a_rotten_checkpoint_is_found_when_only_the_engine_has_to_be_repaired(house):
    house.build()
    good = house.contents()
    folder = next(house.cache.glob("checkpoint/*"))
    rank = folder / "files" / "rank0.safetensors"
    flip_byte(rank)
    record = json.loads((folder / "artifact.json").read_text())
    record["files"]["rank0.safetensors"]["ctime_ns"] = rank.stat().st_ctime_ns
    (folder / "artifact.json").write_text(json.dumps(record))
    next(house.cache.glob("engine/*/files/openvino_model.bin")).unlink()
    house.build()
    assert house.ran == ["checkpoint", "engine"]
    assert house.contents() == good


def test_cache_verify_finds_rot_and_the_next_build_repairs_it(house):
    house.build()
    folder = next(house.cache.glob("engine/*"))
    path = folder / "files" / "openvino_model.bin"
    flip_byte(path)
    for record_file in house.cache.glob("*/*/artifact.json"):
        record = json.loads(record_file.read_text())
        for name, entry in record["files"].items():
            status = (record_file.parent / "files" / name).stat()
            entry.update(ctime_ns=status.st_ctime_ns, mtime_ns=status.st_mtime_ns)
        record_file.write_text(json.dumps(record))
    damaged = [verdict for verdict in Cache(house.cache).verify(output=Output.quiet()) if verdict.problems]
    assert {verdict.stage for verdict in damaged} == {"engine", "repository"}  # they share the file
    house.build()
    assert house.ran[:2] == ["engine", "repository"]
    assert not any(verdict.problems for verdict in Cache(house.cache).verify(output=Output.quiet()))


def test_paranoid_hashes_sources_and_artifacts_in_full(house, monkeypatch):
    house.build()
    from lpxbuild.pipeline import digest

    hashed = []
    real = digest.sha256_file
    monkeypatch.setattr(digest, "sha256_file", lambda path, advance: hashed.append(path.name) or real(path, advance))
    assert house.build(paranoid=True).made == ()
    assert {"model-00001-of-00002.safetensors", "rank0.safetensors", "openvino_model.bin"} <= set(hashed)


def test_an_edited_manifest_is_not_believed(house):
    failing = "smoke.prompts.0.expect=FAIL"
    with pytest.raises(VerdictError):
        house.build(failing)
    path = house.view / "manifest.json"
    path.write_text(path.read_text().replace('"built, not proven"', '"proven"'))
    with pytest.raises(UsageError, match="cannot be used"):
        manifest.read(house.view)
    with pytest.raises(VerdictError):
        house.build(failing)
    assert manifest.read(house.view).state == "built, not proven"
    assert (house.view / "kept" / "manifest.json").exists()


def test_a_failed_smoke_test_is_a_negative_verdict_and_never_proven(house):
    house.build()
    with pytest.raises(VerdictError) as caught:
        house.build("smoke.prompts.0.expect=FAIL")
    assert caught.value.exit_code == 1
    assert manifest.read(house.view).state == "built, not proven"
    assert manifest.read(house.view).data["evidence"]["smoke"]["passed"] is False
    with pytest.raises(VerdictError):
        house.build("smoke.prompts.0.expect=FAIL")
    assert house.ran == ["smoke"]
    assert house.build().state == "proven"
    assert house.ran == []


def test_a_failing_stage_keeps_the_earlier_result(house, monkeypatch):
    house.build()
    good, written = house.contents(), (house.view / "manifest.json").read_bytes()

    def broken(work, destination):
        (destination / "half").write_text("x")
        raise HostError("no memory")

    monkeypatch.setattr(pipeline_stages, "engine", broken)
    ran = pipeline_stages.install(monkeypatch)
    with pytest.raises(HostError):
        house.build("limits.max_input_len=100")
    assert ran == ["engine"]
    assert house.contents() == good
    assert (house.view / "manifest.json").read_bytes() == written
    assert house.leftovers() == []


def test_force_runs_every_stage_again_and_a_failure_keeps_the_old_artifact(house, monkeypatch):
    house.build()
    house.build(force=True)
    assert house.ran == ALL

    def broken(work, destination):
        raise HostError("no memory")

    monkeypatch.setattr(pipeline_stages, "checkpoint", broken)
    pipeline_stages.install(monkeypatch)
    with pytest.raises(HostError):
        house.build(force=True)
    assert house.build().state == "proven"


def test_to_stops_at_a_stage_and_names_it(house):
    for stage, ran in (("source", []), ("checkpoint", ["checkpoint"]), ("repository", ["engine", "repository"])):
        result = house.build(to=stage)
        assert result.state == f"built to {stage}"
        assert house.ran == ran
    with pytest.raises(UsageError, match="no such stage"):
        house.build(to="plan")


def test_an_earlier_full_build_stays_when_only_a_part_is_asked_for(house):
    house.build()
    assert house.build(to="checkpoint").state == "proven"
    assert (house.view / "repository").is_dir()
    # With another checkpoint the later stages would be of another model: they leave the view.
    assert house.build("parallel.tensor=1", to="checkpoint").state == "built to checkpoint"
    assert not (house.view / "repository").exists()
    assert house.build().made == ()


@pytest.mark.parametrize(
    ("overrides", "to", "word"),
    [
        (["backend=vllm"], None, "--to checkpoint"),
        (["backend=tensorrt"], None, "--to checkpoint"),
        (["backend=pytorch", "quantization.format=int8_wo"], "checkpoint", "none"),
        (["backend=pytorch", "quantization.overrides={'*.mlp.*': int8_wo}"], "checkpoint", "int8_wo"),
    ],
)
def test_what_this_version_cannot_build_is_refused_before_anything_is_fetched(house, overrides, to, word):
    shutil.rmtree(house.source)
    with pytest.raises(RecipeError) as caught:
        house.build(*overrides, to=to)
    assert word in str(caught.value)
    assert not house.cache.exists()
    assert not house.view.exists()


def test_tensorrt_shares_the_checkpoint_with_openvino(house):
    house.build(to="checkpoint")
    assert house.build("backend=tensorrt", to="checkpoint").state == "built to checkpoint"
    assert house.ran == []


def test_a_missing_package_is_found_before_the_first_stage(house, monkeypatch):
    from lpxbuild.pipeline import host

    monkeypatch.setattr(host, "find_spec", lambda name: None if name == "pytriton" else object())
    with pytest.raises(HostError, match="nvidia-pytriton"):
        house.build()
    assert house.ran == []
    assert house.build(to="checkpoint").state == "built to checkpoint"


def test_a_stage_that_has_no_room_is_not_begun(house, monkeypatch):
    from lpxbuild.pipeline import host

    monkeypatch.setattr(host, "free_bytes", lambda folder: 1000)
    with pytest.raises(HostError) as caught:
        house.build()
    assert "needed" in caught.value.what
    assert "free" in caught.value.what
    assert house.ran == []


def test_why_names_the_moved_input_and_does_nothing(house):
    assert [plan.runs for plan in house.why().stages] == [False, True, True, True, True]
    assert not house.cache.exists()
    assert not house.view.exists()
    house.build()
    assert not any(plan.runs for plan in house.why().stages)
    before = sorted((path, path.stat().st_mtime_ns) for path in house.folder.rglob("*"))
    plan = house.why("limits.max_input_len=512")
    assert "limits.max_input_len: 1024 → 512" in plan.text()
    assert [stage.runs for stage in plan.stages] == [False, False, True, True, True]
    (house.view / "engine" / "engine.json").write_text("{}")
    assert any("engine/engine.json was changed" in line for line in house.why().build_folder)
    after = sorted((path, path.stat().st_mtime_ns) for path in house.folder.rglob("*"))
    assert len(before) == len(after)


def test_two_builds_at_once_make_each_artifact_once(house):
    recipe = Recipe.load(house.recipe_path, [])
    results, outputs = [], [Output.quiet(), Output.quiet()]

    def run(index):
        results.append(
            building.build(
                recipe,
                recipe_path=house.recipe_path,
                cache_dir=house.cache,
                build_dir=house.folder / f"build{index}",
                output=outputs[index],
            )
        )

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.state for result in results] == ["proven", "proven"]
    assert sorted(house.ran) == sorted(ALL)


def test_two_names_share_artifacts_without_hashing_each_other(house, monkeypatch):
    house.build()
    house.recipe_path.write_text(house.recipe_path.read_text().replace("tiny", "other"))
    house.build()
    assert house.ran == []
    house.recipe_path.write_text(house.recipe_path.read_text().replace("other", "tiny"))
    assert house.build().state == "proven"
    assert house.output.notices == []


def test_prune_leaves_what_a_build_shows_and_says_so(house):
    house.build()
    cache = Cache(house.cache)
    pruned = cache.prune(output=Output.quiet())
    assert pruned.removed == ()
    assert {entry.stage for entry in pruned.kept_in_use} == set(ALL)
    house.build("limits.max_input_len=512")  # now the older engine is shown by nobody
    dry = cache.prune(dry_run=True, output=Output.quiet())
    assert [entry.stage for entry in dry.removed].count("engine") == 1
    assert len(cache.ls()) == 7
    assert len(cache.prune(output=Output.quiet()).removed) == 3
    good = house.contents()
    cache.prune(include_used=True, output=Output.quiet())
    assert cache.ls() == []
    assert house.contents() == good  # links keep the view alive
    assert house.build("limits.max_input_len=512").state == "proven"
    assert house.contents() == good


def test_the_lock_pins_files_and_versions(house):
    with pytest.raises(UsageError, match="there is no"):
        house.build(locked=True)
    house.build()
    lock = house.folder / "recipe.lock"
    text = lock.read_text()
    assert "model-00001-of-00002.safetensors" in text
    assert "openvino" in text
    house.build(locked=True)
    assert lock.read_text() == text
    flip_byte(house.source / "model-00002-of-00002.safetensors", offset=4000)
    with pytest.raises(SourceError) as caught:
        house.build(locked=True)
    assert "model-00002-of-00002.safetensors" in caught.value.why
    assert house.ran == []
    assert lock.read_text() == text
    house.build()
    assert lock.read_text() != text
    lock.write_text(lock.read_text().replace("openvino: 20", "openvino: 19"))
    with pytest.raises(SourceError, match="--locked") as caught:
        house.build(locked=True)
    assert "version of openvino: 19" in caught.value.why


def test_a_hub_source_is_pinned_and_an_unchanged_build_asks_no_network(house, monkeypatch):
    from lpxbuild import source

    commits = ["1" * 40, "2" * 40]
    asked = []

    def fetch(location, revision, *, accept, output):
        commit = revision if revision in commits else commits[-1]
        asked.append((location, revision))
        return house.folder / "hub" / "snapshots" / commit

    for commit in commits:
        shutil.copytree(house.source, house.folder / "hub" / "snapshots" / commit)
    monkeypatch.setattr(source, "fetch", fetch)
    house.recipe_path.write_text("name: tiny\nmodel: {source: org/model}\nsmoke: {prompts: [{text: hello}]}\n")
    house.build(to="checkpoint")
    assert asked == [("org/model", None)]
    assert f"commit: '{'2' * 40}'" in (house.folder / "recipe.lock").read_text()
    commits.append("3" * 40)  # the branch moves on; the lock holds
    house.build(to="checkpoint")
    house.build(to="checkpoint", locked=True)
    assert not any(plan.runs for plan in house.why(to="checkpoint").stages)
    assert (asked, house.ran) == ([("org/model", None)], [])
    shutil.rmtree(house.folder / "hub" / "snapshots" / ("2" * 40))
    with pytest.raises(SourceError):
        house.build(to="checkpoint", locked=True)
    assert asked[-1] == ("org/model", "2" * 40)


def test_relative_sources_start_from_the_recipe(house, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert house.build(to="checkpoint").state == "built to checkpoint"


def test_the_home_of_nobody_is_a_source_that_is_not_there(house):
    with pytest.raises(SourceError, match="~nobody-of-this-host/model"):
        house.build("model.source=~nobody-of-this-host/model")


def test_the_key_reads_every_file_that_the_checked_source_names(house):
    from lpxbuild.pipeline.source_input import source_files
    from lpxbuild.source import check

    for case in ("baseline", "baseline_tp2", "qwen2_qkv_bias", "tied_no_lm_head"):
        source = check(CASES / case, origin=case, need_tokenizer=True, output=Output.quiet())
        assert {file.name for file in source.files} <= set(source_files(CASES / case))


def test_the_cache_commands_answer_in_json_and_verify_is_a_verdict(house):
    import io

    from lpxbuild.pipeline import command

    def answer(function, *arguments, **options):
        text = io.StringIO()
        function(house.cache, *arguments, output=Output("json", stdout=text, stderr=io.StringIO()), **options)
        return json.loads(text.getvalue())

    nothing = {"max_age_days": None, "max_gib": None, "everything": False, "dry_run": False}
    assert answer(command.cache_prune, **nothing)["removed"] == []  # no cache yet
    house.build()
    assert {row["stage"] for row in answer(command.cache_ls)["artifacts"]} == set(ALL)
    assert answer(command.cache_verify)["sound"] == 4
    assert len(answer(command.cache_prune, **nothing)["kept_in_use"]) == 4
    flip_byte(next(house.cache.glob("checkpoint/*/files/rank0.safetensors")))
    with pytest.raises(VerdictError, match="1 of 4") as caught:
        answer(command.cache_verify)
    assert "rank0.safetensors was changed" in caught.value.why
    assert len(answer(command.cache_prune, **nothing | {"everything": True})["removed"]) == 4


def test_a_source_that_changes_while_it_is_read_makes_no_artifact(house, monkeypatch):
    weights = house.source / "model-00002-of-00002.safetensors"
    original = weights.read_bytes()
    stand_in = pipeline_stages.checkpoint

    def interrupted(work, destination):
        weights.write_bytes(original[:-1] + b"\x01")
        return stand_in(work, destination)

    monkeypatch.setattr(pipeline_stages, "checkpoint", interrupted)
    pipeline_stages.install(monkeypatch)
    with pytest.raises(SourceError, match=f"{weights.name} of model changed while it was read"):
        house.build()
    assert house.leftovers() == []
    weights.write_bytes(original)
    monkeypatch.setattr(pipeline_stages, "checkpoint", stand_in)
    house.ran = pipeline_stages.install(monkeypatch)
    house.build()
    assert house.ran == ALL


def test_what_was_noticed_about_the_source_is_in_the_manifest(house):
    shutil.rmtree(house.source)
    shutil.copytree(CASES / "added_token_beyond_vocab", house.source)
    for _ in range(2):
        house.build("parallel.tensor=1", to="checkpoint")
        found = manifest.read(house.view).data["notices"]
        assert [line for line in found if "tokens beyond vocab_size" in line]


def test_the_newest_verdict_counts(house, monkeypatch):
    from lpxbuild.pipeline.outcomes import EvidenceFailed

    house.build()
    stand_in = pipeline_stages.smoke

    def failing(work, destination):
        raise EvidenceFailed("the smoke test failed: prompt 1", stage="smoke", why="", next="", evidence={}, files={})

    monkeypatch.setattr(pipeline_stages, "smoke", failing)
    pipeline_stages.install(monkeypatch)
    with pytest.raises(VerdictError):
        house.build(force=True)
    # The same digests again: the earlier success proves nothing any more.
    with pytest.raises(VerdictError):
        house.build()
    assert manifest.read(house.view).state == "built, not proven"
    monkeypatch.setattr(pipeline_stages, "smoke", stand_in)
    pipeline_stages.install(monkeypatch)
    assert house.build().state == "proven"


NOT_RUN: dict[str, set[str]] = {
    "source": {"families", "quantization"},  # read by the check of a folder, not by the conversion of a GGUF
    "engine": {"source"},  # read by the converter, not by the reader of checkpoints
    "smoke": {"repository"},  # refuses a repository, changes nothing of one
}


def test_a_key_holds_the_code_of_every_room_that_its_stage_imports():
    import re

    import lpxbuild
    from lpxbuild.pipeline.stages import STAGES

    package = Path(lpxbuild.__file__).parent
    for stage in STAGES:
        imported = set()
        for room in stage.rooms:
            for file in (package / room).rglob("*.py"):
                text = file.read_text()
                imported |= set(re.findall(r"^\s*(?:from|import) lpxbuild\.(\w+)", text, re.MULTILINE))
                imported |= set(re.findall(r"^\s*from lpxbuild import (\w+)", text, re.MULTILINE))
                imported |= set(re.findall(r'shipped\("(\w+)"\)', text))
        rooms = {name for name in imported if (package / name).is_dir() or name == "model_repo"}
        assert rooms - set(stage.rooms) - NOT_RUN.get(stage.name, set()) == set(), stage.name


def test_the_file_that_another_build_is_writing_is_left_alone(house, monkeypatch):
    from lpxbuild.pipeline import placing

    house.build()
    temporary, file = placing._own_file(house.view / "recipe.lock")
    with file:
        house.build(force=True)
        assert temporary.exists()
    house.build(force=True)
    assert not temporary.exists()


# a shorter build beside an earlier full one ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pruned", "another cache"])
def test_a_good_engine_survives_a_shorter_build_that_its_cache_lacks(house, how):
    house.build()
    before = house.contents()
    if how == "pruned":
        Cache(house.cache).prune(include_used=True, output=Output.quiet())
    else:
        house.cache = house.folder / "second"
    result = house.build(to="checkpoint")
    assert house.ran == ["checkpoint"]
    assert house.contents() == before
    assert result.state == "built to repository"
    assert "smoke" in house.said()  # the proof lay in the cache: said, not taken over from the manifest
    assert house.build(to="checkpoint").state == "built to repository"
    assert house.ran == []
    assert not (house.view / "kept").exists()
    assert house.build().state == "proven"


def test_an_engine_that_no_longer_fits_is_kept_aside_when_only_the_build_has_it(house):
    house.build()
    engine = (house.view / "engine" / "openvino_model.bin").read_bytes()
    Cache(house.cache).prune(include_used=True, output=Output.quiet())
    assert house.build("parallel.tensor=1", to="checkpoint").state == "built to checkpoint"
    assert (house.view / "kept" / "engine" / "openvino_model.bin").read_bytes() == engine
    assert not (house.view / "engine").exists()
    assert f"{house.view / 'engine'} belongs to an earlier build" in house.said()


def test_an_engine_that_no_longer_fits_goes_when_the_cache_has_it(house):
    house.build()
    house.build("parallel.tensor=1", to="checkpoint")
    assert not (house.view / "engine").exists()
    assert not (house.view / "kept").exists()
    assert "engine" in house.said()


def test_a_changed_engine_is_no_earlier_good_one(house):
    house.build()
    flip_byte(house.view / "engine" / "openvino_model.bin")
    Cache(house.cache).prune(include_used=True, output=Output.quiet())
    assert house.build(to="checkpoint").state == "built to checkpoint"
    assert (house.view / "kept" / "engine" / "openvino_model.bin").exists()
    assert not (house.view / "repository").exists()


# a smoke test that fails later -------------------------------------------------------------------------------------


class Report:
    def as_dict(self):
        return {"checks": [{"name": "prompt 1", "status": "fail", "detail": "wrong text", "seconds": 0.1}]}

    def junit(self):
        return "<testsuite/>\n"


def test_a_later_failing_smoke_test_lowers_the_state_until_a_build_proves_it_again(house):
    assert house.build().state == "proven"
    tested = manifest.read(house.view)
    evidence.note_failure(house.view, tested, Report(), Cache(house.cache), output=house.output)
    lowered = manifest.read(house.view)
    assert lowered.state == "built, not proven"
    assert manifest.differences(house.view, lowered) == []
    assert "wrong text" in (house.view / "evidence" / "smoke.json").read_text()
    assert "'built, not proven'" in house.said()
    assert [plan.stage for plan in house.why().stages if plan.runs] == ["smoke"]
    assert house.build(to="checkpoint").state == "built to repository"
    assert house.build().state == "proven"
    assert house.ran == ["smoke"]
    assert house.build().made == ()


def test_a_later_failure_of_a_build_that_moved_on_changes_nothing(house):
    house.build()
    tested = manifest.read(house.view)
    house.build("limits.max_input_len=32")
    written = (house.view / "manifest.json").read_bytes()
    evidence.note_failure(house.view, tested, Report(), Cache(house.cache), output=house.output)
    assert (house.view / "manifest.json").read_bytes() == written


def test_what_was_pruned_between_the_two_locks_is_made_again(house, monkeypatch):
    from lpxbuild.pipeline.cache import KeyLock

    shared, pruned = KeyLock.shared, []

    def late(lock):
        folders = list((house.cache / "engine").glob("[0-9a-f]*"))
        if folders and not pruned:
            pruned.extend(folders)
            shutil.rmtree(folders[0])
        shared(lock)

    monkeypatch.setattr(KeyLock, "shared", late)
    assert house.build().state == "proven"
    assert house.ran == ["checkpoint", "engine", "engine", "repository", "smoke"]


def test_a_failed_smoke_test_is_a_document_with_path_state_and_report(house):
    with pytest.raises(VerdictError) as caught:
        house.build('smoke.prompts=[{"text": "hello", "expect": "FAIL"}]')
    details = caught.value.as_dict()["details"]
    assert (details["path"], details["state"]) == (str(house.view), "built, not proven")
    assert details["report"]["digest"]


def test_an_engine_that_changes_while_a_build_looks_at_it_is_not_half_kept(house, monkeypatch):
    house.build()
    shutil.rmtree(house.cache)
    real = building.Workspace.shown

    def changed_after(workspace, old, stage, **options):
        found = real(workspace, old, stage, **options)
        if stage == "engine":
            (house.view / stage / "engine.json").write_text("mine")
        return found

    monkeypatch.setattr(building.Workspace, "shown", changed_after)
    with pytest.raises(HostError, match="changed while"):
        house.build(to="checkpoint")


# patterns of quantization -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openvino", "vllm"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("quantization.exclude=['*.mlp.down_prj']", "'*.mlp.down_prj'"),
        ("quantization.exclude=['transformer.layers.0.mlp.proj']", "layers.0.mlp"),
        ("quantization.overrides={'lm_head': fp8_pc_pt}", "lm_head"),
        ("quantization.exclude=['*.self_attn.k_proj']", "k_proj"),
        ("quantization.exclude=['*']", "format fp8_pc_pt is used by no layer"),
        ("quantization.overrides={'*': fp8}", "format fp8_pc_pt is used by no layer"),
        ("quantization.overrides={'*.mlp.*': none, '*.mlp.down_proj': fp8}", "'*.mlp.down_proj' of quantization.over"),
    ],
)
def test_patterns_that_change_nothing_or_split_a_matrix_are_refused_before_weights(house, backend, override, said):
    with pytest.raises(RecipeError) as caught:
        house.build("quantization.format=fp8_pc_pt", f"backend={backend}", override, to="checkpoint")
    assert said in f"{caught.value.what} {caught.value.why}"
    assert house.ran == []


@pytest.mark.parametrize(
    "override",
    ["quantization.exclude=['*']", "parallel.tensor=1024", "quantization.format=int4_rtn", "backend=pytorch"],
)
def test_why_refuses_what_the_build_refuses_by_recipe_and_config(house, override):
    given = ["quantization.format=fp8_pc_pt", override]
    to = "engine" if override == "backend=pytorch" else "checkpoint"
    said = []
    for ask in (house.build, house.why):
        with pytest.raises((RecipeError, SourceError)) as caught:
            ask(*given, to=to)
        said.append((caught.value.what, caught.value.next))
    assert said[0] == said[1]
    assert house.ran == []


def test_an_exclusion_without_a_format_is_refused(house):
    with pytest.raises(RecipeError, match="exclude is given, but no format"):
        house.build("quantization.exclude=['*.mlp.*']", to="checkpoint")


# the stage verify ---------------------------------------------------------------------------------------------------


def answers(status: str) -> str:
    """The override that makes the stand-in's verdict."""
    return f"verify.prompts=['{status}']"


def test_a_verify_that_passes_or_warns_is_evidence_and_runs_once(house, monkeypatch):
    ran = pipeline_stages.install_verify(monkeypatch)
    for status in ("pass", "warn"):
        result = house.build(answers(status))
        assert result.state == "proven"
        found = result.manifest.data["evidence"]
        assert (found["ran"], found["verify"]["passed"]) == (["verify", "smoke"], True)
        assert found["verify"]["report"]["status"] == status
        assert (house.view / "evidence" / "verify.html").is_file()
        assert ("verify: stand-in: so it is" in house.said()) == (status == "warn")
        assert house.build(answers(status)).made == ()
    assert ran == ["pass", "warn"]


def test_a_verify_that_fails_leaves_the_build_not_proven(house, monkeypatch):
    ran = pipeline_stages.install_verify(monkeypatch)
    for _ in range(2):
        with pytest.raises(VerdictError, match="not close enough to its source") as caught:
            house.build(answers("fail"))
        assert caught.value.exit_code == 1
        assert caught.value.details["state"] == "built, not proven"
    assert ran == ["fail", "fail"]  # nothing of it is in the cache
    assert json.loads((house.view / "evidence" / "verify.json").read_text())["status"] == "fail"
    # Not to ask again proves nothing: the same files failed.
    assert house.build("verify.run=never").state == "built, not proven"
    assert manifest.read(house.view).data["evidence"]["verify"]["passed"] is False
    assert (house.view / "evidence" / "verify.json").is_file()
    assert house.build(answers("pass")).state == "proven"


def test_a_verify_that_compared_nothing_is_no_evidence_and_not_kept(house, monkeypatch):
    ran = pipeline_stages.install_verify(monkeypatch)
    result = house.build(answers("self-consistent"))
    assert result.state == "proven"  # by the smoke test
    found = result.manifest.data["evidence"]
    assert found["ran"] == ["smoke"]
    assert found["left_out"] == {"verify": "stand-in: so it is"}
    assert "verify was left out: stand-in: so it is" in house.said()
    house.build(answers("self-consistent"))
    assert ran == ["self-consistent", "self-consistent"]
    assert not list(house.cache.glob("verify/[0-9a-f]*"))
    assert evidence.refuted(manifest.read(house.view), Cache(house.cache)) == {}


@pytest.mark.parametrize("demand", ["verify.required=true", "verify.run=always"])
def test_a_recipe_that_demands_verify_is_not_proven_without_a_comparison(house, monkeypatch, demand):
    pipeline_stages.install_verify(monkeypatch)
    with pytest.raises(VerdictError, match="was not compared with its source"):
        house.build(demand, answers("self-consistent"))
    assert manifest.read(house.view).state == "built, not proven"
    assert house.build(demand, answers("pass")).state == "proven"
    pipeline_stages.install_verify(monkeypatch, left_out="too little memory")
    with pytest.raises(HostError, match="verify cannot run here: too little memory"):
        house.build(demand, answers("warn"), "limits.max_input_len=64")


def test_a_verify_that_cannot_run_here_is_said_and_does_not_hinder(house, monkeypatch):
    pipeline_stages.install_verify(monkeypatch, left_out="too little memory")
    result = house.build()
    assert result.state == "proven"
    assert result.manifest.data["evidence"]["left_out"] == {"verify": "too little memory"}
    assert "verify was left out: too little memory" in house.said()
    assert house.build(to="checkpoint").state == "proven"
    assert manifest.read(house.view).data["evidence"]["left_out"] == {"verify": "too little memory"}
    # What an earlier verify found stays evidence on a host that could not run it now.
    pipeline_stages.install_verify(monkeypatch)
    house.build()
    pipeline_stages.install_verify(monkeypatch, left_out="too little memory")
    assert house.build().manifest.data["evidence"]["ran"] == ["verify", "smoke"]


@pytest.mark.parametrize("how", ["as a stage", "only by hand"])
def test_a_later_failing_verify_takes_the_proof_until_one_passes(house, monkeypatch, how):
    from lpxbuild.pipeline import verifying

    if how == "as a stage":
        pipeline_stages.install_verify(monkeypatch)
    assert house.build(answers("pass")).state == "proven"
    tested, verdict = manifest.read(house.view), pipeline_stages.verdict("fail", "wrong")
    files = verifying.reports(verdict, "lpx verify")
    verifying.note(house.view, tested, verdict, files, Cache(house.cache), output=house.output)
    assert manifest.read(house.view).state == "built, not proven"
    if how == "only by hand":
        assert house.build(answers("pass")).state == "built, not proven"
        pipeline_stages.install_verify(monkeypatch)
    else:
        assert [plan.stage for plan in house.why(answers("pass")).stages if plan.runs] == ["verify"]
    assert house.build(answers("pass")).state == "proven"
    assert house.ran == []


@pytest.mark.parametrize(
    "override", ["limits.max_seq_len=1536", "runtime.threads=1", "verify.tokens=64", "verify.fail.max_kl=0.5"]
)
def test_what_verify_reads_is_in_its_key(house, monkeypatch, override):
    ran = pipeline_stages.install_verify(monkeypatch)
    house.build(answers("pass"))
    house.build(answers("pass"), override)
    assert ran == ["pass", "pass"]


def test_locked_refuses_other_calibration_texts(house, monkeypatch):
    from lpxbuild.quantization import calibration

    def calibrate(_folder, destination, **_options):
        (destination / "scales.safetensors").write_bytes(b"stand-in")
        return {"tensors": 1}

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setattr(calibration, "check_calibration", lambda *_arguments, **_options: None)
    texts = house.folder / "texts.txt"
    texts.write_text("one line\n")
    options = ("quantization.format=fp8", "quantization.calibration.dataset=texts.txt")
    house.build(*options, to="checkpoint")
    assert house.build(*options, to="checkpoint", locked=True).made == ()
    texts.write_text("another line\n")
    with pytest.raises(SourceError, match="--locked") as caught:
        house.build(*options, to="checkpoint", locked=True)
    assert "dataset (calibration)" in caught.value.why


# an FP8 KV cache, and what TensorRT-LLM's checkpoint cannot say -----------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        (["kv_cache=fp8"], False),
        (["kv_cache=fp8", "calibration={}"], True),
        (["kv_cache=fp8", "calibration.samples=4"], True),
        (["kv_cache=int8"], True),
        (["kv_cache=fp8", "format=fp8"], True),
    ],
)
@pytest.mark.parametrize("backend", ["openvino", "tensorrt", "vllm"])
def test_whether_an_fp8_cache_is_measured_is_the_recipe_s_decision(house, overrides, measured, backend):
    from lpxbuild.pipeline.stages import stages_to

    given = [f"quantization.{text}" for text in overrides]
    recipe = Recipe.load(house.recipe_path, [f"backend={backend}", *given])
    stages = [stage.name for stage in stages_to("checkpoint", recipe, house.folder)]
    assert ("calibration" in stages) == (measured or backend == "vllm")


def test_another_backend_on_the_command_line_does_not_ask_for_a_measurement(house):
    house.build("quantization.kv_cache=fp8", backend="tensorrt", to="checkpoint")
    assert house.ran == ["checkpoint"]


def shape_of(**fields):
    from lpxbuild.families import family_for

    config = json.loads((CASES / "baseline_tp2" / "config.json").read_text())
    return family_for({**config, **fields}).model_shape({**config, **fields})


def test_a_window_is_said_with_the_runtime_s_word_for_it():
    from lpxbuild.pipeline.converting import runtime_notices

    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    (notice,) = runtime_notices(shape_of(**mistral))
    assert "window of 16 tokens is no part" in notice
    assert "max_attention_window" in notice
    assert runtime_notices(shape_of()) == []


def test_dynamic_rope_beyond_its_length_is_refused_before_a_checkpoint(house):
    """TensorRT-LLM's `dynamic` is another kind, so the checkpoint has plain RoPE, which is right up to that length."""
    from dataclasses import replace

    from lpxbuild.pipeline.converting import check_rope, runtime_notices

    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    shape = replace(shape_of(), rotary_scaling=scaling)
    check_rope(shape, 64)
    with pytest.raises(SourceError, match=r"max_seq_len 65 is beyond the 64 tokens") as caught:
        check_rope(shape, 65)
    assert caught.value.next == "set limits.max_seq_len to at most 64"
    (notice,) = runtime_notices(shape)
    assert "right up to 64 tokens" in notice


def test_dynamic_rope_is_refused_for_the_backend_tensorrt_by_config_json(house):
    path = house.source / "config.json"
    config = json.loads(path.read_text())
    internlm2 = {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "bias": False,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    path.write_text(json.dumps({**config, **internlm2}))
    limits = ["limits.max_input_len=32", "limits.max_num_tokens=32"]
    with pytest.raises(SourceError, match="max_seq_len 65 is beyond the 64 tokens"):
        house.why("backend=tensorrt", *limits, "limits.max_seq_len=65", to="checkpoint")
    plan = house.why("backend=tensorrt", *limits, "limits.max_seq_len=64", to="checkpoint")
    assert [one.stage for one in plan.stages if one.runs] == ["checkpoint"]
