"""Sources of families whose tensors have other names than Llama's: buffers, missing first words, layers, heads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lpxbuild.errors import SourceError
from lpxbuild.families import families, family_for
from lpxbuild.output import Output
from lpxbuild.source import Source, check

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import BASES

Arrays = dict[str, np.ndarray]


def write(folder: Path, family: str, change: Callable[[Arrays], Arrays] = dict) -> Path:
    described = {"architectures": list(families()[family].architectures), "model_type": family, "dtype": "float32"}
    config = {**BASES[family], **described, "torch_dtype": "float32", "eos_token_id": 2}
    shape = family_for(config).model_shape(config)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(spec.shape).astype(np.float32)
        for name, spec in families()[family].tensors(shape).items()
        if spec.required
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(change(arrays), folder / "model.safetensors")
    return folder


def checked(folder: Path) -> Source:
    return check(folder, origin="tiny", need_tokenizer=False, output=Output.quiet())


@pytest.mark.parametrize("family", sorted(BASES))
def test_each_family_finds_its_tensors(family: str, tmp_path: Path) -> None:
    source = checked(write(tmp_path / "model", family))
    assert source.shape.family == family
    assert source.notices == ()


def test_files_of_gpt2_on_the_hub(tmp_path: Path) -> None:
    """openai-community/gpt2 has no `transformer.` and holds the triangular masks."""

    def hub(arrays: Arrays) -> Arrays:
        masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for layer in range(4)}
        return {name.removeprefix("transformer."): array for name, array in arrays.items()} | masks

    short = checked(write(tmp_path / "hub", "gpt2", hub))
    long = checked(write(tmp_path / "saved", "gpt2"))
    assert set(short.tensors) == set(long.tensors)
    assert short.notices == ()
    name = "transformer.h.3.mlp.c_fc.weight"
    assert short.tensors[name].shape == long.tensors[name].shape == (64, 256)


@pytest.mark.parametrize(
    ("family", "missing", "words"),
    [
        ("gpt2", "transformer.h.2.", r"layer 2 \(transformer\.h\.2\) is missing"),
        ("falcon", "transformer.h.3.mlp.dense_4h_to_h", r"dense_4h_to_h\.weight \(layer 3\) is missing"),
        ("internlm2", "output.", r"output\.weight is missing and config\.json says tie_word_embeddings false"),
    ],
)
def test_what_is_missing_has_the_familys_name(family: str, missing: str, words: str, tmp_path: Path) -> None:
    def without(arrays: Arrays) -> Arrays:
        return {name: array for name, array in arrays.items() if not name.startswith(missing)}

    with pytest.raises(SourceError, match=words):
        checked(write(tmp_path / "model", family, without))


def test_other_rows_than_the_vocabulary_has(tmp_path: Path) -> None:
    def shorter(arrays: Arrays) -> Arrays:
        name = "model.tok_embeddings.weight"
        return {**arrays, name: np.ascontiguousarray(arrays[name][:300])}

    with pytest.raises(SourceError, match="300 rows in the file, vocab_size 320"):
        checked(write(tmp_path / "model", "internlm2", shorter))


def test_a_head_that_is_not_the_tied_table(tmp_path: Path) -> None:
    def untied(arrays: Arrays) -> Arrays:
        return {**arrays, "lm_head.weight": arrays["transformer.wte.weight"] + 1}

    with pytest.raises(SourceError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        checked(write(tmp_path / "model", "gpt2", untied))


def test_what_is_no_part_of_the_model_is_refused_inside_and_left_out_outside(tmp_path: Path) -> None:
    extra = {"transformer.h.0.adapter.weight": np.ones(4, np.float32)}
    with pytest.raises(SourceError, match=r"transformer\.h\.0\.adapter\.weight is not part of a gpt2 model"):
        checked(write(tmp_path / "inside", "gpt2", lambda arrays: arrays | extra))
    outside = {"vision.patch.weight": np.ones(4, np.float32)}
    assert "vision.patch.weight" in checked(write(tmp_path / "x", "gpt2", lambda arrays: arrays | outside)).notices[0]
