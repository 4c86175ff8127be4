"""Speed and memory of a conversion, against the floor of copying the same bytes, and against NVIDIA ModelOpt.

    python benchmarks/conversion.py [--layers 24] [--rounds 9] [--folder /dev/shm] [--workers N] [--peer PYTHON]

A random bfloat16 Llama of 443 million parameters (24 layers) is converted with tensor parallel 2: copied, cast to
float16, and to every format that needs no data (fp8 and nvfp4 with given scales of the input). Floor: pread and pwrite
of the same bytes in 16 MiB blocks; for formats also plain numpy and ml_dtypes doing their arithmetic (largest
magnitude, division, rounding, cast) on the same arrays. Floor and conversion alternate in one process; printed are
median and quartiles of the pairwise ratios. No fsync, no hashing, no interpreter start is measured. Peak memory is
RssAnon of a process of its own that converts once, sampled every 2 ms. `--peer` names an interpreter with ModelOpt
(default: `.venv-ref`, which `make ref` sets up), which then does the same jobs as lpx on a model of 8 layers
(191 million parameters: the whole comparison stays under ten minutes). Exit status 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from lpxbuild.checkpoint import convert
from lpxbuild.output import Output
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 1024, 4096, 16, 8, 32000
BLOCK = 16 << 20
SHARD = 200_000_000
BOUNDS = {"copy": 1.5, "cast": 4.0}
FORMATS = ("int8_wo", "int4_wo", "fp8_pc_pt", "int4_rtn", "w4a16_nvfp4", "fp8", "nvfp4")
FORMAT_BOUND = 1.3  # of copy floor + arithmetic floor
PEER = Path(__file__).resolve().parents[1] / ".venv-ref" / "bin" / "python"
PEER_LAYERS = 8
PEERS = ("none", "fp8_pc_pt", "int4_rtn", "w4a16_nvfp4", "fp8", "nvfp4")
PEER_BOUNDS = {"with import": 5.0, "without": 2.0, "anonymous peak": 4.0}


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tensor_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def write_model(folder: Path, layers: int) -> None:
    """A Hugging Face folder of random weights in shards of at most 200 MB."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers)))
    (folder / "generation_config.json").write_text("{}")
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensor_shapes(layers).items():
        size = 2 * int(np.prod(shape))
        if filled + size > SHARD:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    generator = np.random.default_rng(0)
    index: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, object] = {}
        position = 0
        for name, shape in shapes.items():
            end = position + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
            position = end
            index[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for shape in shapes.values():
                weights = generator.standard_normal(int(np.prod(shape)), dtype=np.float32) * np.float32(0.02)
                stream.write((weights.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def checked(folder: Path) -> Source:
    return check(folder, origin="random", need_tokenizer=False, tensor_parallel=2, output=Output.quiet())


def floor(source: Path, destination: Path) -> float:
    """Seconds to read all weight bytes and write them to two files."""
    files = sorted(source.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    destination.mkdir()
    started = time.perf_counter()
    targets = [os.open(destination / f"floor{rank}", os.O_RDWR | os.O_CREAT) for rank in (0, 1)]
    written = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        position = 0
        while data := os.pread(descriptor, BLOCK, position):
            half = int(written >= total // 2)
            os.pwrite(targets[half], data, written - half * (total // 2))
            position += len(data)
            written += len(data)
        os.close(descriptor)
    for target in targets:
        os.close(target)
    seconds = time.perf_counter() - started
    shutil.rmtree(destination)
    return seconds


def arithmetic(source: Path, name: str) -> float:
    """Seconds that plain numpy and ml_dtypes take for a format's arithmetic on every linear of the layers."""
    seconds = 0.0
    for file in sorted(source.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        for tensor, entry in json.loads(data[8 : 8 + length].tobytes()).items():
            if "_proj." not in tensor:
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            weight = np.frombuffer(data[begin:end], ml_dtypes.bfloat16).reshape(entry["shape"])
            started = time.perf_counter()
            plain_arithmetic(weight, name)
            seconds += time.perf_counter() - started
    return seconds


def plain_arithmetic(weight: np.ndarray, name: str) -> np.ndarray:
    """Largest magnitude, division, rounding, cast: float32 in between."""
    values = weight.astype(np.float32)
    if name == "fp8":
        return (values / (np.abs(values).max() / np.float32(448))).astype(ml_dtypes.float8_e4m3fn)
    if name == "fp8_pc_pt":
        scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
        return (values / scales).astype(ml_dtypes.float8_e4m3fn)
    if name == "int4_rtn":
        groups = values.reshape(len(values), -1, 128)
        scales = np.abs(groups).max(axis=2, keepdims=True) / np.float32(7)
        return np.clip(np.rint(groups / scales), -8, 7).astype(np.int8)
    blocks = values.reshape(len(values), -1, 16)
    whole = np.abs(values).max() / np.float32(6 * 448)
    scales = (np.abs(blocks).max(axis=2, keepdims=True) / (6 * whole)).astype(ml_dtypes.float8_e4m3fn)
    return (blocks / (scales.astype(np.float32) * whole)).astype(ml_dtypes.float4_e2m1fn)


def constant_calibration(layers: int) -> Calibration:
    """Largest inputs of 8 everywhere: what a calibration would have found is not measured here."""
    names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    amax = np.array(8.0, np.float32)
    modules = (f"model.layers.{layer}.{name}_proj" for layer in range(layers) for name in names)
    return Calibration({f"{module}.input_quantizer._amax": amax for module in modules})


def conversion(source: Source, destination: Path, dtype: str, workers: int, name: str = "none") -> float:
    started = time.perf_counter()
    convert(
        source,
        destination,
        dtype=dtype,
        scheme=Scheme(name),
        calibration=constant_calibration(source.shape.num_hidden_layers),
        tensor_parallel=2,
        workers=workers,
        output=Output.quiet(),
    )
    seconds = time.perf_counter() - started
    shutil.rmtree(destination)
    return seconds


def summary(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"median {middle:.2f}, quartiles {low:.2f}–{high:.2f}, n {len(values)}"


def measure(folder: Path, layers: int, rounds: int, workers: int, *, bounded: bool) -> bool:
    """Ratios of the copy (bfloat16) and of the cast (float16) to the floor; whether the bounds hold."""
    model = folder / f"model{layers}"
    if not model.exists():
        write_model(model, layers)
    source = checked(model)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    target = folder / "out"
    floor(model, target)
    conversion(source, target, "bfloat16", workers)
    times: dict[str, list[float]] = {"floor": [], "copy": [], "cast": []}
    for _ in range(rounds):
        times["floor"].append(floor(model, target))
        times["copy"].append(conversion(source, target, "bfloat16", workers))
        times["cast"].append(conversion(source, target, "float16", workers))
    print(f"{layers} layers, {size / 1e6:.0f} MB, tensor parallel 2, {workers} worker(s), {folder}")
    print(f"  floor: median {statistics.median(times['floor']):.3f} s")
    held = True
    for kind, label in (("copy", "bfloat16 to bfloat16"), ("cast", "bfloat16 to float16")):
        ratios = [mine / base for mine, base in zip(times[kind], times["floor"])]
        verdict = ""
        if bounded:
            good = statistics.median(ratios) <= BOUNDS[kind]
            held = held and good
            verdict = f" (bound {BOUNDS[kind]}: {'held' if good else 'MISSED'})"
        print(f"  {label}: {statistics.median(times[kind]):.3f} s; / floor: {summary(ratios)}{verdict}")
    return held


def measure_formats(folder: Path, layers: int, rounds: int, workers: int) -> bool:
    """Ratios of every data-free format to copy floor + arithmetic floor; whether the bound holds."""
    model = folder / f"model{layers}"
    source, target = checked(model), folder / "out"
    held = True
    for name in FORMATS:
        copied = name in ("int8_wo", "int4_wo")
        conversion(source, target, "bfloat16", workers, name)
        ratios, floors, mine = [], [], []
        for _ in range(rounds):
            floors.append(floor(model, target) + (0.0 if copied else arithmetic(model, name)))
            mine.append(conversion(source, target, "bfloat16", workers, name))
            ratios.append(mine[-1] / floors[-1])
        bound = BOUNDS["copy"] if copied else FORMAT_BOUND
        good = statistics.median(ratios) <= bound
        held = held and good
        print(
            f"  {name}: {statistics.median(mine):.3f} s; floor {statistics.median(floors):.3f} s; "
            f"/ floor: {summary(ratios)} (bound {bound}: {'held' if good else 'MISSED'})"
        )
    return held


def sampled(command: list[str]) -> tuple[float, int, str]:
    """(seconds, peak RssAnon, standard output) of a process."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.002)
    seconds = time.perf_counter() - started
    if process.wait() != 0:
        raise SystemExit(f"failed: {' '.join(command)}")
    assert process.stdout is not None
    return seconds, peak, process.stdout.read()


def once(folder: Path, layers: int, workers: int, name: str, dtype: str) -> tuple[float, int, float]:
    """(seconds with start and import, peak RssAnon, seconds of the conversion) of a process that converts once."""
    command = [sys.executable, __file__, "--once", str(folder / f"model{layers}"), str(folder / "out")]
    seconds, peak, printed = sampled([*command, "--workers", str(workers), "--format", name, "--dtype", dtype])
    shutil.rmtree(folder / "out")
    return seconds, peak, float(printed)


def peak_memory(folder: Path, layers: int, workers: int) -> bool:
    """Peak RssAnon of a process that converts once, against 4 × largest tensor + 150 MB."""
    largest = 2 * max(int(np.prod(shape)) for shape in tensor_shapes(layers).values())
    bound = 4 * largest + 150_000_000
    held = True
    for name, dtype in (("none", "float16"), ("fp8", "bfloat16"), ("int4_rtn", "bfloat16"), ("nvfp4", "bfloat16")):
        _, peak, _ = once(folder, layers, workers, name, dtype)
        held = held and peak <= bound
        print(
            f"  peak RssAnon, {layers} layers, {workers} worker(s), {name} in {dtype}: {peak / 1e6:.0f} MB "
            f"(bound {bound / 1e6:.0f} MB: {'held' if peak <= bound else 'MISSED'}; "
            f"largest tensor {largest / 1e6:.0f} MB)"
        )
    return held


def against_peer(folder: Path, layers: int, workers: int, python: Path) -> bool:
    """The same jobs by ModelOpt in the same run; whether lpx is as much faster and smaller as promised."""
    held = True
    print(f"ModelOpt beside lpx, {layers} layers, tensor parallel 2, one process each")
    script = Path(__file__).parent / "peers" / "modelopt_export.py"
    for name in PEERS:
        theirs, their_peak, printed = sampled(
            [str(python), str(script), str(folder / f"model{layers}"), str(folder / "peer"), name]
        )
        shutil.rmtree(folder / "peer")
        steps = json.loads(printed.splitlines()[-1])
        mine, my_peak, converting = once(folder, layers, workers, name, "bfloat16")
        ratios = {
            "with import": theirs / mine,
            "without": (theirs - steps["import"]) / converting,
            "anonymous peak": their_peak / my_peak,
        }
        good = all(ratios[key] >= bound for key, bound in PEER_BOUNDS.items())
        held = held and good
        listed = ", ".join(f"{key} {ratio:.1f}x (bound {PEER_BOUNDS[key]:g}x)" for key, ratio in ratios.items())
        print(
            f"  {name}: ModelOpt {theirs:.1f} s, {their_peak / 1e6:.0f} MB; "
            f"lpx {mine:.2f} s ({converting:.2f} s without "
            f"import), {my_peak / 1e6:.0f} MB: {listed}: {'held' if good else 'MISSED'}"
        )
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, help="measure in this folder as well, without a bound")
    parser.add_argument("--once", nargs=2, type=Path, metavar=("MODEL", "OUT"), help="convert once, print the seconds")
    parser.add_argument("--format", default="none", help="of --once")
    parser.add_argument("--dtype", default="float16", help="of --once")
    parser.add_argument("--peer", type=Path, default=PEER, help="interpreter with nvidia-modelopt and transformers")
    parser.add_argument("--formats-only", action="store_true", help="not the copy and the cast, one size of model")
    options = parser.parse_args()
    if options.once:
        model, target = options.once
        source = checked(model)
        started = time.perf_counter()
        convert(
            source,
            target,
            dtype=options.dtype,
            scheme=Scheme(options.format),
            calibration=constant_calibration(source.shape.num_hidden_layers),
            tensor_parallel=2,
            workers=options.workers,
            output=Output.quiet(),
        )
        print(time.perf_counter() - started)
        return 0
    held = True
    with tempfile.TemporaryDirectory(prefix="lpx-conversion-", dir=options.folder) as name:
        folder = Path(name)
        for layers in (options.layers,) if options.formats_only else (options.layers, 2 * options.layers):
            if options.formats_only:
                write_model(folder / f"model{layers}", layers)
            else:
                held &= measure(folder, layers, options.rounds, options.workers, bounded=True)
            held &= peak_memory(folder, layers, options.workers)
            if layers == options.layers:
                held &= measure_formats(folder, layers, options.rounds, options.workers)
            shutil.rmtree(folder / f"model{layers}")
        if options.peer.exists():
            write_model(folder / f"model{PEER_LAYERS}", PEER_LAYERS)
            held &= against_peer(folder, PEER_LAYERS, options.workers, options.peer)
        else:
            print(f"not compared with ModelOpt: there is no {options.peer} (make ref)")
    if options.disk:
        with tempfile.TemporaryDirectory(prefix="lpx-conversion-", dir=options.disk) as name:
            measure(Path(name), options.layers, 3, options.workers, bounded=False)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
