"""Checkpoints that must be refused before their weights are read, and what must be said about those that pass."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.quantization import check_shapes
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check

DATA = Path(__file__).parent / "data"
CASES = {path.name: json.loads((path / "case.json").read_text()) for path in sorted(DATA.iterdir())}


NOW = {path.parent.name: json.loads(path.read_text()) for path in sorted(DATA.glob("*/now.json"))}
"""Outcomes that a later version of lpx has in place of case.json's, for each layout of the checkpoint."""


def named(*outcomes: str) -> list[str]:
    return [name for name, case in CASES.items() if case["outcome"] in outcomes and name not in NOW]


def scheme_of(case) -> Scheme:
    recipe = case.expected["recipe"]
    return Scheme(recipe["quantization"], group_size=recipe.get("group_size", 128))


def checked(case, output: Output | None = None, **options) -> Source:
    """Both checks that a build makes before it reads a weight."""
    options = {"need_tokenizer": True, "tensor_parallel": case.tensor_parallel, **options}
    source = check(case.path, origin=str(case.path), output=output or Output.quiet(), **options)
    check_shapes(source.shape, scheme_of(case), options["tensor_parallel"])
    return source


@pytest.mark.parametrize("name", named("refuses"))
def test_refused_with_cause_and_fix(name, load_case):
    case = load_case(name)
    begun = time.monotonic()
    with pytest.raises(SourceError) as refusal:
        checked(case)
    assert time.monotonic() - begun < 2
    error = refusal.value
    assert error.exit_code == 2
    assert case.missing_words(str(error)) == []
    assert error.why
    assert error.next


@pytest.mark.parametrize("name", named("converts"))
def test_passes_without_a_word(name, load_case):
    source = checked(load_case(name))
    assert source.notices == ()
    assert source.end_ids
    assert 0 <= source.pad_id < source.shape.vocab_size


@pytest.mark.parametrize("name", named("converts_or_refuses"))
def test_never_silent_where_either_is_right(name, load_case):
    case = load_case(name)
    output = Output.quiet()
    try:
        said = " ".join(checked(case, output).notices)
        assert said == " ".join(output.notices)
    except SourceError as refusal:
        said = str(refusal)
    if case.expected["notice_always"]:
        assert case.missing_words(said) == []


@pytest.mark.parametrize("name", ["kv_heads_uneven", "intermediate_odd"])
def test_lists_the_tensor_parallel_sizes_that_work(name, load_case):
    case = load_case(name)
    with pytest.raises(SourceError) as refusal:
        checked(case)
    works = case.expected["tp_sizes_that_work"]
    assert refusal.value.next.rstrip(".").endswith(": " + ", ".join(map(str, works)))
    for size in works:
        checked(case, tensor_parallel=size)


def test_lists_the_group_sizes_that_work(load_case):
    case = load_case("int4_group_misfit")
    with pytest.raises(SourceError) as refusal:
        checked(case)
    works = case.expected["group_sizes_that_work"]
    assert f"quantization.group_size to {' or '.join(map(str, works))}," in refusal.value.next
    source = check(case.path, origin="x", need_tokenizer=True, output=Output.quiet())
    for size in works:
        check_shapes(source.shape, replace(scheme_of(case), group_size=size), case.tensor_parallel)


def test_config_fields_are_as_the_cases_say(load_case):
    wanted = ("head_size", "num_key_value_heads", "rotary_base", "tie_word_embeddings", "vocab_size", "dtype")
    seen = 0
    for name in named("converts"):
        case = load_case(name)
        shape = checked(case).shape
        for key in wanted:
            if key in case.expected["config"]:
                seen += 1
                assert getattr(shape, key) == case.expected["config"][key], (name, key)
    assert seen > 10


def test_end_ids_are_the_whole_set(load_case):
    case = load_case("eos_list")
    source = checked(case)
    assert source.end_ids == tuple(case.expected["stop_ids"])
    assert source.pad_id == 0


def test_a_checkpoint_can_go_on_without_a_tokenizer(load_case):
    source = checked(load_case("tokenizer_absent"), need_tokenizer=False)
    assert source.end_ids == (2,)


def test_truncated_shard_gives_expected_and_found_bytes_and_the_download(load_case):
    case = load_case("shard_truncated")
    with pytest.raises(SourceError) as refusal:
        check(case.path, origin="example-org/tiny", need_tokenizer=True, output=Output.quiet())
    found = (case.path / "model-00002-of-00002.safetensors").stat().st_size
    whole = (DATA / "baseline_tp2" / "model-00002-of-00002.safetensors").stat().st_size
    assert f"expected {whole} bytes" in refusal.value.what
    assert f"found {found}" in refusal.value.what
    assert refusal.value.next == (
        f"hf download example-org/tiny model-00002-of-00002.safetensors --local-dir {case.path}"
    )


def test_a_redundant_head_that_differs_is_refused(load_case, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(load_case("tied_with_equal_head").path, folder)
    source = check(folder, origin="x", need_tokenizer=True, output=Output.quiet())
    entry = source.tensors["lm_head.weight"]
    with entry.file.open("r+b") as file:
        file.seek(entry.end - 1)
        last = file.read(1)
        file.seek(entry.end - 1)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(SourceError, match=r"lm_head\.weight differs .* tie_word_embeddings true"):
        check(folder, origin="x", need_tokenizer=True, output=Output.quiet())
