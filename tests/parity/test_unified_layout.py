"""The unified layout's files, what it refuses, how much memory it takes, and its numbers in transformers."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from lpxbuild.checkpoint.unified import check_unified, convert_unified, read_unified
from lpxbuild.errors import LpxError, RecipeError, SourceError
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source

sys.path.insert(0, str(Path(__file__).parent))
import unified_reference as reference

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = reference.write_source("llama", tmp_path_factory.mktemp("unified") / "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"):
        (folder / name).write_text(json.dumps({"model": {"vocab": {}}, "file": name}))
    return reference.checked(folder)


def convert(source: Source, destination: Path, export: str, model: str = "llama", **settings: Any) -> Path:
    convert_unified(
        source,
        destination,
        dtype="bfloat16",
        scheme=reference.SCHEMES[export],
        calibration=reference.calibration(model, export),
        output=Output.quiet(),
        **settings,
    )
    return destination


class TestFiles:
    def test_one_file_where_it_fits(self, llama: Source, tmp_path: Path) -> None:
        folder = convert(llama, tmp_path / "out", "fp8")
        assert sorted(file.name for file in folder.iterdir()) == [
            "config.json",
            "generation_config.json",
            "hf_quant_config.json",
            "model.safetensors",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ]
        for name in ("generation_config.json", "tokenizer.json", "tokenizer.model"):
            assert (folder / name).read_bytes() == (llama.path / name).read_bytes()

    def test_plain_checkpoint_has_no_quantization(self, llama: Source, tmp_path: Path) -> None:
        folder = convert(llama, tmp_path / "out", "none")
        assert not (folder / "hf_quant_config.json").exists()
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())

    @pytest.mark.parametrize("workers", [1, 3])
    def test_shards_and_their_index(self, llama: Source, tmp_path: Path, workers: int) -> None:
        limit = 60_000
        whole = reference.stored(convert(llama, tmp_path / "whole", "nvfp4-kv"))
        folder = convert(llama, tmp_path / "parts", "nvfp4-kv", max_shard_bytes=limit, workers=workers)
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        count = len(files)
        assert count > 3
        assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        assert reference.stored(folder) == whole
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in whole.values())
        for file in files:
            with safe_open(folder / file, "numpy") as opened:
                names = list(opened.keys())
                assert {index["weight_map"][name] for name in names} == {file}
                assert opened.metadata() == {"format": "pt"}
            assert sum(len(whole[name][2]) for name in names) <= limit
        assert set(index["weight_map"]) == set(whole)
        reader = read_unified(folder)
        assert set(reader.weights) <= set(whole)

    def test_a_tensor_larger_than_a_shard_gets_one_of_its_own(self, llama: Source, tmp_path: Path) -> None:
        folder = convert(llama, tmp_path / "out", "none", max_shard_bytes=1)
        assert len(list(folder.glob("*.safetensors"))) == len(reference.expected("llama", "none"))

    def test_type_of_the_weights_stands_under_the_keys_that_the_source_has(self, tmp_path: Path) -> None:
        for number, (given, wanted) in enumerate(
            (
                ({"dtype": "bfloat16"}, {"dtype": "float16"}),
                ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}),
                ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, {"dtype": "float16", "torch_dtype": "float16"}),
            )
        ):
            folder = reference.write_source("qwen2", tmp_path / f"in{number}")
            config = json.loads((folder / "config.json").read_text())
            config = {key: value for key, value in config.items() if "dtype" not in key} | given
            (folder / "config.json").write_text(json.dumps(config))
            out = tmp_path / f"out{number}"
            convert_unified(reference.checked(folder), out, dtype="float16", output=Output.quiet())
            written = json.loads((out / "config.json").read_text())
            assert {key: value for key, value in written.items() if "dtype" in key} == wanted

    def test_report(self, llama: Source, tmp_path: Path) -> None:
        report = convert_unified(llama, tmp_path / "out", dtype="float16", output=Output.quiet(), workers=2)
        plain = reference.expected("llama", "none")
        sizes = [np.prod([int(size) for size in text.split()[1].split("x")]) for text in plain.values()]
        assert report.parameters == sum(sizes)
        assert report.casts == {"BF16": len(plain)}
        assert report.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
        assert set(report.extents) == set(plain)
        assert not report.overflows


class TestRefusals:
    def test_int8_kv_cache(self, llama: Source, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"kv_cache int8 has no form") as error:
            convert_unified(llama, tmp_path / "out", dtype="auto", scheme=Scheme("none", "int8"))
        assert "FP8 KV caches only" in str(error.value)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", ["int8_wo", "int4_wo", "int4_rtn"])
    def test_formats_without_a_unified_form(self, llama: Source, name: str) -> None:
        with pytest.raises(RecipeError, match=f"{name} has no form"):
            check_unified(llama.shape, Scheme(name))

    @pytest.mark.parametrize("scheme", [Scheme("fp8"), Scheme("int4_awq"), Scheme("none", "fp8")])
    def test_missing_calibration(self, llama: Source, tmp_path: Path, scheme: Scheme) -> None:
        with pytest.raises(RecipeError, match="needs a calibration"):
            convert_unified(llama, tmp_path / "out", dtype="auto", scheme=scheme)
        assert not (tmp_path / "out").exists()

    def test_patterns_that_fit_nothing(self, llama: Source) -> None:
        with pytest.raises(RecipeError, match=r"pattern '\*\.gate' .* fits no linear layer") as error:
            check_unified(llama.shape, Scheme("fp8", exclude=("lm_head", "*.gate")))
        assert "gate_proj" in str(error.value)
        check_unified(llama.shape, Scheme("fp8", exclude=("lm_head", "*embed_tokens")))

    def test_different_formats_in_a_stacked_matrix(self, llama: Source) -> None:
        with pytest.raises(RecipeError, match=r"q_proj: fp8, .*k_proj: none"):
            check_unified(llama.shape, Scheme("fp8", exclude=("*.k_proj",)))
        check_unified(llama.shape, Scheme("fp8", exclude=("*.[qkv]_proj",)))

    def test_different_formats_of_experts(self, tmp_path: Path) -> None:
        source = reference.checked(reference.write_source("mixtral", tmp_path / "in"))
        with pytest.raises(RecipeError, match="experts of layer 0 have different formats"):
            check_unified(source.shape, Scheme("fp8", exclude=("*.experts.1.*",)))
        check_unified(source.shape, Scheme("fp8", exclude=("*.experts.*",)))

    def test_formats_of_experts_that_no_kernel_loads(self, tmp_path: Path) -> None:
        source = reference.checked(reference.write_source("mixtral", tmp_path / "in"))
        for backend, name in (("vllm", "fp8_pc_pt"), ("pytorch", "int4_awq"), ("pytorch", "fp8_pc_pt")):
            check_unified(source.shape, Scheme(name))
            check_unified(source.shape, Scheme(name, exclude=("*.experts.*",)), backend=backend)
            with pytest.raises(RecipeError, match=f"{name} does not fit .*experts.0.w3, an expert") as error:
                check_unified(source.shape, Scheme(name), backend=backend)
            assert "fp8, nvfp4" in str(error.value)
        check_unified(source.shape, Scheme("fp8", "fp8"), backend="vllm")

    def test_groups_that_do_not_fit(self, llama: Source) -> None:
        """128 input features: 48 is no divisor."""
        with pytest.raises(SourceError, match=r"q_proj has 128 input features, int4_awq needs a multiple of 48"):
            check_unified(llama.shape, Scheme("int4_awq", group_size=48))

    def test_groups_of_w4a8(self, llama: Source) -> None:
        with pytest.raises(RecipeError, match="group_size 64 does not fit w4a8_awq"):
            check_unified(llama.shape, Scheme("w4a8_awq", group_size=64))

    def test_what_vllm_would_misread(self, llama: Source) -> None:
        mixed = Scheme("fp8", overrides={"*mlp*": "fp8_pc_pt"})
        check_unified(llama.shape, mixed, backend="pytorch")
        with pytest.raises(RecipeError, match="fp8_pc_pt beside fp8 cannot be loaded by backend vllm"):
            check_unified(llama.shape, mixed, backend="vllm")
        check_unified(llama.shape, Scheme("fp8", overrides={"*mlp*": "nvfp4"}), backend="vllm")
        with pytest.raises(RecipeError, match="without a weight format"):
            check_unified(llama.shape, Scheme("none", "fp8"), backend="vllm")
        check_unified(llama.shape, Scheme("none", "fp8"), backend="pytorch")

    def test_a_file_that_cannot_be_written(self, llama: Source, tmp_path: Path) -> None:
        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        done = subprocess.run(
            [sys.executable, "-c", WRITE, llama.path, tmp_path / "out", "fp8_pc_pt"],
            capture_output=True,
            text=True,
            preexec_fn=limited,
        )
        assert "HostError" in done.stderr
        assert f"{tmp_path}/out/model.safetensors could not be written" in done.stderr
        assert not (tmp_path / "out" / "config.json").exists()

    def test_damaged_checkpoints_are_named(self, llama: Source, tmp_path: Path) -> None:
        folder = convert(llama, tmp_path / "out", "fp8", max_shard_bytes=60_000)
        gone = next(iter(sorted(folder.glob("*.safetensors"))))
        gone.unlink()
        with pytest.raises(LpxError, match=gone.name):
            read_unified(folder)


WRITE = """
import sys
import time
from pathlib import Path
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import check
source = check(Path(sys.argv[1]), origin="sparse", need_tokenizer=False, output=Output.quiet())
convert_unified(source, Path(sys.argv[2]), dtype="bfloat16", scheme=Scheme(sys.argv[3]), workers=2,
                output=Output.quiet())
"""


def sparse_source(folder: Path, hidden: int) -> Path:
    """A Llama with holes for weights, nothing on disk; its largest tensors have 6 · hidden² bytes."""
    folder.mkdir()
    inner, key_value = 3 * hidden, hidden // 4
    config = {
        **reference.record("llama")["config"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": key_value // 128,
        "head_dim": 128,
        "vocab_size": 1000,
        "num_hidden_layers": 1,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": [1000, hidden],
        f"{layer}self_attn.q_proj.weight": [hidden, hidden],
        f"{layer}self_attn.k_proj.weight": [key_value, hidden],
        f"{layer}self_attn.v_proj.weight": [key_value, hidden],
        f"{layer}self_attn.o_proj.weight": [hidden, hidden],
        f"{layer}mlp.gate_proj.weight": [inner, hidden],
        f"{layer}mlp.up_proj.weight": [inner, hidden],
        f"{layer}mlp.down_proj.weight": [hidden, inner],
        f"{layer}input_layernorm.weight": [hidden],
        f"{layer}post_attention_layernorm.weight": [hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [1000, hidden],
    }
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return folder


@pytest.mark.parametrize(
    ("hidden", "name"),
    [
        (1024, "w4a16_nvfp4"),
        *(pytest.param(4096, name, marks=pytest.mark.full) for name in ("none", "fp8_pc_pt", "w4a16_nvfp4")),
    ],
)
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path, hidden: int, name: str) -> None:
    """The largest tensors take 6 MB, or 100 MB: nothing is held whole, and the peak is that of two workers' blocks."""
    folder = sparse_source(tmp_path / "source", hidden)
    process = subprocess.Popen([sys.executable, "-c", WRITE, folder, tmp_path / "out", name])
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.02)
    shutil.rmtree(tmp_path / "out")
    assert process.returncode == 0
    print(f"peak RssAnon {peak / MIB:.0f} MiB")
    assert peak < 100 * MIB


COMPUTED = [
    ("llama", "none"),
    ("llama", "fp8"),
    ("llama", "fp8_pc_pt"),
    ("llama", "int8_sq"),
    ("llama", "int4_awq-g64"),
    ("llama", "w4a8_awq"),
    ("llama", "w4a16_nvfp4"),
    ("gpt2", "fp8"),
    ("gpt2", "int4_awq"),
    ("gemma2", "int4_awq"),
]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory, reference_python: Path) -> dict[tuple[str, str], Any]:
    """(model, export) → logits of transformers with the checkpoint's effective weights; "source" → of the model."""
    place = tmp_path_factory.mktemp("computed")
    folders: dict[tuple[str, str], Path] = {}
    for model in {model for model, _ in COMPUTED}:
        folders[model, "source"] = reference.write_source(model, place / f"{model}-source")
    for model, export in COMPUTED:
        plain = export == "none"  # in several files, so that transformers goes through the index
        limits = {"max_shard_bytes": 100_000} if plain else {}
        source = reference.checked(folders[model, "source"])
        made = convert(source, place / f"{model}-{export}", export, model, **limits)
        folders[model, export] = made if plain else put_into_transformers(made, place / f"{model}-{export}-numbers")
    script = ROOT / "tests" / "reference" / "folder_logits.py"
    done = subprocess.run([reference_python, script, *folders.values()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, str], Any] = {key: np.load(folder / "logits.npy") for key, folder in folders.items()}
    return {**found, ("transformers", "quant_methods"): done.stdout.split()}


def put_into_transformers(checkpoint: Path, folder: Path) -> Path:
    """A float32 Hugging Face folder with the effective weights of a unified checkpoint."""
    folder.mkdir()
    reader = read_unified(checkpoint)
    config = {key: value for key, value in reader.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: reader.weight(name) for name in reader.weights}, folder / "model.safetensors", {"format": "pt"})
    return folder


class TestInTransformers:
    def test_a_plain_checkpoint_is_the_model(self, computed: dict[tuple[str, str], Any]) -> None:
        assert np.array_equal(computed["llama", "none"], computed["llama", "source"])

    @pytest.mark.parametrize(("model", "export"), [case for case in COMPUTED if "nvfp4" not in case[1]][1:])
    def test_effective_weights_compute_what_modelopts_model_does(
        self, computed: dict[tuple[str, str], Any], model: str, export: str
    ) -> None:
        """ModelOpt's fake-quantized model of the same calibration, with the weights as it was about to export them.

        They differ less than the format changes the model: FP8 by the export's division in bfloat16, which rounds
        numbers between two steps the other way, W4A8 by FP8 behind INT4, others by the order of float32 operations.
        """
        with safe_open(reference.RECORDS / f"{model}.safetensors", "numpy") as file:
            theirs = file.get_tensor(f"{export}/logits")
        ours, plain = computed[model, export][-8:], computed[model, "source"][-8:]
        rounding, quantization = np.abs(ours - theirs).max(), np.abs(plain - theirs).max()
        assert quantization > 0
        assert rounding < {"fp8": 0.6, "w4a8_awq": 0.4}.get(export, 0.2) * quantization

    def test_nvfp4_weights_are_within_their_steps(self, tmp_path: Path, llama: Source) -> None:
        """E2M1 steps are 2 at most between 4 and 6: an element is off by 1 block scale at most, zeros stay."""
        reader = read_unified(convert(llama, tmp_path / "out", "nvfp4"))
        plain = read_unified(convert(llama, tmp_path / "plain", "none"))
        name = "model.layers.0.mlp.gate_proj"
        weight, original = reader.weight(f"{name}.weight"), plain.weight(f"{name}.weight")
        steps = reader.stored(f"{name}.weight_scale").astype(np.float32) * reader.stored(f"{name}.weight_scale_2")
        error = np.abs(weight - original).reshape(*steps.shape, 16)
        # The block scale itself is rounded to FP8, by 1/16 at most, so 6 of its steps may miss the largest element.
        assert (error <= (1 + 6 / 16) * steps[..., None]).all()
        assert np.corrcoef(weight.ravel(), original.ravel())[0, 1] > 0.99

    def test_no_quantizer_of_transformers_reads_this_layout(self, computed: dict[tuple[str, str], Any]) -> None:
        """Why the numbers go through the reader: transformers knows no quant_method "modelopt" and would load FP8 bits
        as if they were weights. When this fails, load the checkpoints themselves."""
        assert "compressed-tensors" in computed["transformers", "quant_methods"]
        assert "modelopt" not in computed["transformers", "quant_methods"]


def test_rows_are_those_of_the_whole(llama: Source, tmp_path: Path) -> None:
    for export in ("fp8_pc_pt", "int4_awq", "nvfp4", "int8_sq", "mixed"):
        reader = read_unified(convert(llama, tmp_path / export, export))
        for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"):
            whole = reader.weight(name)
            assert whole.shape == reader.shape(name) == tuple(llama.tensors[name].shape)
            assert np.array_equal(reader.rows(name, 10, 26), whole[10:26])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("export", ["fp8-kv", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4", "w4a16_nvfp4"])
def test_other_types_of_the_unquantized_weights(llama: Source, tmp_path: Path, export: str, dtype: str) -> None:
    """From the bfloat16 source: what is wider holds the same numbers, and scales of 16-bit numbers are the same."""
    found = {}
    for name in ("bfloat16", dtype):
        convert_unified(
            llama,
            tmp_path / name,
            dtype=name,
            scheme=reference.SCHEMES[export],
            calibration=reference.calibration("llama", export),
            output=Output.quiet(),
        )
        found[name] = reference.stored(tmp_path / name)
    assert set(found[dtype]) == set(found["bfloat16"])
    kind = {"float16": "F16", "float32": "F32"}[dtype]
    assert {found[dtype][name][0] for name in ("lm_head.weight", "model.norm.weight")} == {kind}
    ours, theirs = (read_unified(tmp_path / name) for name in (dtype, "bfloat16"))
    for name in ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.self_attn.o_proj.weight", "lm_head.weight"):
        # A number between two steps may go either way: the widest are 2 of E2M1's 6, 1 of INT4's 7, 32 of E4M3's 448.
        step = np.abs(theirs.weight(name)).max() / (3 if "4" in export else 14)
        assert np.abs(ours.weight(name) - theirs.weight(name)).max() <= step * 1.01, name


def test_files_of_other_tools_are_not_read_as_this_layout(llama: Source, tmp_path: Path) -> None:
    folder = convert(llama, tmp_path / "out", "none")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(SourceError, match="quant_method gptq"):
        read_unified(folder)


def test_formats_are_named(llama: Source, tmp_path: Path) -> None:
    reader = read_unified(convert(llama, tmp_path / "out", "mixed"))
    assert reader.format_of("model.layers.0.mlp.down_proj") == "fp8_pc_pt"
    assert reader.format_of("model.layers.0.self_attn.q_proj") == "fp8"
    assert reader.format_of("lm_head") == "none"
    found = reader.key_value_scales("model.layers.0.self_attn")
    amax = reference.calibration("llama", "mixed").key_value_amax("model.layers.0.self_attn")
    assert found == tuple(float(np.float32(value) / np.float32(448)) for value in amax)
    assert read_unified(convert(llama, tmp_path / "plain", "none")).key_value_scales("model.layers.0.self_attn") is None
