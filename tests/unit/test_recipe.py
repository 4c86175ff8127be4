"""The recipe: strictness, places in messages, interpolation, overrides, drift of what is generated."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from lpxbuild.errors import RecipeError
from lpxbuild.recipe import Recipe
from lpxbuild.recipe.first import first_recipe, recipe_name
from lpxbuild.recipe.library import shipped_recipes
from lpxbuild.recipe.loading import parse
from lpxbuild.recipe.reference import json_schema

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = "name: t\nmodel: {source: ./m}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return Recipe.load(path, list(overrides))


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_defaults_are_explicit(tmp_path: Path) -> None:
    recipe = load(tmp_path, SMALLEST)
    assert (recipe.backend, recipe.quantization.format, recipe.parallel.tensor) == ("openvino", "none", 1)
    assert (recipe.limits.max_batch_size, recipe.limits.max_seq_len) == (8, 2048)
    assert recipe.runtime.kv_cache_bytes == 1 << 30


def test_unknown_key_names_file_line_and_nearest(tmp_path: Path) -> None:
    message = refused(tmp_path, SMALLEST + "limits:\n  max_batch_sise: 4\n")
    assert "r.yaml:4" in message
    assert "limits.max_batch_sise" in message
    assert "limits.max_batch_size" in message


@pytest.mark.parametrize(
    ("key", "points_to"),
    [
        ("max_output_len: 512", "max_seq_len"),
        ("tp_size: 2", "parallel.tensor"),
        ("qformat: fp8", "quantization.format"),
    ],
)
def test_keys_of_other_tools_are_translated(tmp_path: Path, key: str, points_to: str) -> None:
    assert points_to in refused(tmp_path, SMALLEST + key + "\n")


def test_key_at_the_wrong_level_is_found(tmp_path: Path) -> None:
    assert "limits.max_batch_size" in refused(tmp_path, SMALLEST + "max_batch_size: 4\n")


@pytest.mark.parametrize("value", ['"8"', "8.5", "-1", "0", "true", "null", "[8]"])
def test_counts_are_whole_numbers(tmp_path: Path, value: str) -> None:
    message = refused(tmp_path, SMALLEST + f"limits:\n  max_batch_size: {value}\n")
    assert "r.yaml:4" in message
    assert "limits.max_batch_size" in message


def test_numbers_of_a_closed_list_are_named(tmp_path: Path) -> None:
    message = refused(tmp_path, SMALLEST + "quantization: {group_size: 32}\n")
    assert "valid values: 64, 128" in message
    assert "`quantization.group_size` is 32" in message


def test_every_problem_is_in_one_message(tmp_path: Path) -> None:
    message = refused(tmp_path, "name: T\nmodel: {source: x, dtyp: auto}\nbackend: openvio\n")
    for part in ("r.yaml:1", "r.yaml:2", "r.yaml:3", "`openvino`", "model.dtyp", "3 problems"):
        assert part in message


def test_sizes_that_contradict_each_other(tmp_path: Path) -> None:
    message = refused(tmp_path, SMALLEST + "limits: {max_input_len: 4096, max_seq_len: 2048}\n")
    assert "4096" in message
    assert "2048" in message
    message = refused(
        tmp_path,
        SMALLEST + "limits: {max_input_len: 64, max_num_tokens: 32}\nruntime: {enable_chunked_context: false}\n",
    )
    assert "chunked" in message
    message = refused(tmp_path, SMALLEST + "limits: {max_beam_width: 4}\n")
    assert "streaming" in message
    assert "beam" in message


def test_interpolation_takes_the_type_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPX_TEST_TENSOR", "3")
    text = SMALLEST + "parallel:\n  tensor: ${LPX_TEST_TENSOR}\n  pipeline: ${LPX_TEST_PIPELINE:-2}\n"
    recipe = load(tmp_path, text)
    assert (recipe.parallel.tensor, recipe.parallel.pipeline) == (3, 2)
    # Quoted, the same text stays a text, and the schema refuses it.
    assert "parallel.tensor" in refused(tmp_path, SMALLEST + 'parallel: {tensor: "${LPX_TEST_TENSOR}"}\n')
    assert "line of its own" in refused(tmp_path, SMALLEST + "parallel: {tensor: ${LPX_TEST_TENSOR}}\n")
    assert load(tmp_path, "name: t\nmodel: {source: a$$b}\n").model.source == "a$b"


def test_interpolation_without_a_value(tmp_path: Path) -> None:
    message = refused(tmp_path, "name: t\nmodel:\n  source: ${LPX_TEST_NOT_SET}\n")
    assert "r.yaml:3" in message
    assert "LPX_TEST_NOT_SET" in message


def test_overrides_obey_the_schema(tmp_path: Path) -> None:
    recipe = load(tmp_path, SMALLEST, "parallel.tensor=4", "quantization.format=int8_wo")
    assert (recipe.parallel.tensor, recipe.quantization.format) == (4, "int8_wo")
    assert "--set limits.max_batch_size=two" in refused(tmp_path, SMALLEST, "limits.max_batch_size=two")
    assert "parallel.tensor" in refused(tmp_path, SMALLEST, "parallel.tensr=4")
    assert "key=value" in refused(tmp_path, SMALLEST, "parallel.tensor")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: a\nname: b\nmodel: {source: x}\n", "given twice"),
        ("name: [\n", "not valid YAML"),
        ("- a\n", "mapping"),
        ("", "nothing"),
        (
            "name: t\nmodel: {source: x}\nsmoke: {prompts: [{text: a, messages: [{role: user, content: b}]}]}\n",
            "either",
        ),
    ],
)
def test_broken_documents(tmp_path: Path, text: str, part: str) -> None:
    assert part in refused(tmp_path, text)


def test_missing_file_names_similar_ones(tmp_path: Path) -> None:
    (tmp_path / "mistral.yaml").write_text(SMALLEST)
    with pytest.raises(RecipeError, match=r"mistral\.yaml"):
        Recipe.load(tmp_path / "mistrall.yaml")


def test_shipped_recipes_load_and_match_the_json_schema() -> None:
    schema = json.loads(json_schema())
    entries = shipped_recipes()
    assert len(entries) >= 3
    for entry in entries:
        text = entry.path.read_text(encoding="utf-8")
        assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n"), entry.name
        assert Recipe.load(entry.path).name == entry.name
        assert entry.title
        jsonschema.validate(yaml.safe_load(text), schema)


def test_json_schema_refuses_what_the_loader_refuses() -> None:
    schema = json.loads(json_schema())
    for wrong in ({"limits": {"max_batch_size": "8"}}, {"limit": {}}, {"backend": "onnx"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"name": "t", "model": {"source": "x"}, **wrong}, schema)


def test_first_recipe_is_valid(tmp_path: Path) -> None:
    text = first_recipe(
        "org/Model_7B", {"model_type": "llama", "max_position_embeddings": 512}, revision="abc", chat=True, schema="s"
    )
    recipe = load(tmp_path, text)
    assert (recipe.name, recipe.limits.max_seq_len, recipe.model.revision) == ("model_7b", 512, "abc")
    assert recipe.smoke.prompts[0].messages is not None
    assert recipe_name("./models/Tiny Llama.gguf") == "tiny-llama"


@pytest.mark.parametrize("text", ["name: x\nmodel: here\n", "name: x\nmodel: {source: a}\nlimits: 8\n", "name: 5\n"])
def test_every_mistake_in_a_recipe_names_the_next_step(text):
    with pytest.raises(RecipeError) as caught:
        parse(text, "r.yaml", [])
    assert caught.value.next
    for line in caught.value.what.splitlines():
        assert line.startswith("r.yaml")


@pytest.mark.parametrize("name", ["HF_TOKEN", "NGC_API_KEY", "db_password", "CLIENT_SECRET"])
def test_secrets_are_no_values_of_a_recipe(monkeypatch, name):
    monkeypatch.setenv(name, "hf_verysecret")
    with pytest.raises(RecipeError) as caught:
        parse(f'name: x\nmodel: {{source: a}}\nruntime: {{python: "/x/${{{name}}}"}}\n', "r.yaml", [])
    assert name in caught.value.what
    assert "hf_verysecret" not in str(caught.value)


@pytest.mark.parametrize("name", ["MAX_TOKENS", "TOKENIZER", "KEYBOARD"])
def test_other_variables_may_look_alike(monkeypatch, name):
    monkeypatch.setenv(name, "abc")
    assert parse(f"name: x\nmodel: {{source: a}}\nruntime:\n  python: ${{{name}}}\n", "r.yaml", []).runtime.python
