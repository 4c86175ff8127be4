"""Conversions on hosts that are short of something: memory, disk, file size; sources that change; Ctrl-C."""

from __future__ import annotations

import _thread
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lpxbuild.checkpoint import convert, resources
from lpxbuild.checkpoint.resources import fitting_workers
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.errors import HostError, SourceError
from lpxbuild.memory import available_memory
from lpxbuild.output import Output
from lpxbuild.source import Source

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import checked, config_for, hf_tensors, write_source

MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Source:
    config = config_for()
    return checked(write_source(tmp_path / "source", config, hf_tensors(config)))


def sparse_source(folder: Path, layers: int) -> Path:
    """A bfloat16 Llama of hidden 4096 whose weights are holes: 374 MB a layer, almost nothing on disk."""
    folder.mkdir()
    config = config_for(
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1000,
        num_hidden_layers=layers,
        torch_dtype="bfloat16",
    )
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    position = 0
    for name, shape in _shapes(layers).items():
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return folder


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1000, 4096), "lm_head.weight": (1000, 4096)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (4096, 4096),
            f"{prefix}self_attn.k_proj.weight": (1024, 4096),
            f"{prefix}self_attn.v_proj.weight": (1024, 4096),
            f"{prefix}self_attn.o_proj.weight": (4096, 4096),
            f"{prefix}mlp.gate_proj.weight": (12288, 4096),
            f"{prefix}mlp.up_proj.weight": (12288, 4096),
            f"{prefix}mlp.down_proj.weight": (4096, 12288),
            f"{prefix}input_layernorm.weight": (4096,),
            f"{prefix}post_attention_layernorm.weight": (4096,),
        }
    return shapes | {"model.norm.weight": (4096,)}


CONVERT = """
import sys
from pathlib import Path
from lpxbuild.checkpoint import convert
from lpxbuild.errors import LpxError
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import check
output = Output("human")
source = check(Path(sys.argv[1]), origin="sparse", need_tokenizer=False, tensor_parallel=2, output=output)
try:
    scheme = Scheme(sys.argv[5])
    workers = int(sys.argv[4])
    convert(
        source, Path(sys.argv[2]), dtype=sys.argv[3], scheme=scheme, tensor_parallel=2, workers=workers, output=output
    )
except LpxError as error:
    output.error(error)
    sys.exit(error.exit_code)
"""


def run_convert(
    model: Path,
    target: Path,
    dtype: str,
    workers: int,
    *,
    scheme: str = "none",
    limit: Callable[[], None] | None = None,
) -> tuple[int, str, int]:
    """Exit status, stderr and peak RssAnon of a conversion in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(model), str(target), dtype, str(workers), scheme],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.005)
    _, stderr = process.communicate()
    return process.returncode, stderr, peak


class TestPeak:
    """The bound is 4 × the largest tensor + 150 MB for all workers together, whatever the size of the model."""

    LARGEST = 2 * 12288 * 4096

    @pytest.mark.parametrize("scheme", ["fp8_pc_pt", "int4_rtn", "w4a16_nvfp4"])
    def test_of_quantizing(self, tmp_path: Path, scheme: str) -> None:
        """What a worker needs beside its blocks does not grow with the tensor."""
        model = sparse_source(tmp_path / "source", 1)
        status, stderr, peak = run_convert(model, tmp_path / "out", "bfloat16", 2, scheme=scheme)
        assert status == 0, stderr
        assert peak < 100 * MIB

    @pytest.mark.full  # 20 GB are read as holes and 5 GB written: minutes
    def test_of_twenty_gigabytes(self, tmp_path: Path) -> None:
        """53 layers of 374 MB under a limit of 2 GB of data; the checkpoint has 5.3 GB."""
        needed = 25 * 10**9
        free = shutil.disk_usage(tmp_path).free
        if free < needed:
            pytest.skip(f"needs {needed} bytes on the disk of {tmp_path}, {free} are free")
        model = sparse_source(tmp_path / "source", 53)
        size = (model / "model.safetensors").stat().st_size
        assert size > 19.8e9
        limit = 2 * 10**9

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        try:
            target = tmp_path / "out"
            status, stderr, peak = run_convert(model, target, "bfloat16", 2, scheme="int4_rtn", limit=limited)
            assert status == 0, stderr
            assert peak < 1.5e9
            written = sum(file.stat().st_size for file in target.glob("rank*.safetensors"))
            assert 0.25 * size < written < 0.3 * size
        finally:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)

    @pytest.mark.parametrize("workers", [1, 8])
    def test_of_one_layer(self, tmp_path: Path, workers: int) -> None:
        """One layer (0.37 GB) tells as much as eight, because the bound does not know the model's size."""
        model = sparse_source(tmp_path / "model", 1)
        status, stderr, peak = run_convert(model, tmp_path / "out", "float16", workers)
        assert status == 0, stderr
        assert 5 * MIB < peak < 4 * self.LARGEST + 150_000_000
        assert peak < 300_000_000, "far below the bound: blocks, not tensors, are held"
        assert "memory needed" in stderr
        assert "available" in stderr

    @pytest.mark.full
    def test_of_eight_layers(self, tmp_path: Path) -> None:
        """3 GB; written out in full, so only in make test-all."""
        model = sparse_source(tmp_path / "model", 8)
        status, stderr, peak = run_convert(model, tmp_path / "out", "bfloat16", 1)
        assert status == 0, stderr
        assert peak < 3 * self.LARGEST + 600_000_000
        assert peak < 300_000_000


class TestAddressSpace:
    """`ulimit -v`: what no kernel message would explain."""

    @staticmethod
    def limit(count: int) -> Callable[[], None]:
        return lambda: resource.setrlimit(resource.RLIMIT_AS, (count, count))

    def test_fewer_workers_with_a_notice(self, tmp_path: Path) -> None:
        model = sparse_source(tmp_path / "model", 1)
        status, stderr, _ = run_convert(model, tmp_path / "out", "bfloat16", 8, limit=self.limit(1200 * MIB))
        assert status == 0, stderr
        assert "of 8 workers" in stderr
        assert (tmp_path / "out/config.json").exists()

    def test_refusal_with_both_numbers(self, tmp_path: Path) -> None:
        """The largest tensor alone is 100 MB of address space; little more than the interpreter is allowed."""
        model = sparse_source(tmp_path / "model", 1)
        probe = "import lpxbuild.checkpoint; print(open('/proc/self/statm').read().split()[0])"
        pages = int(subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout)
        allowed = pages * os.sysconf("SC_PAGE_SIZE") + 60 * MIB
        status, stderr, _ = run_convert(model, tmp_path / "out", "bfloat16", 1, limit=self.limit(allowed))
        assert status == 3, stderr
        assert "the conversion needs 125.8 MB of memory" in stderr  # 100.7 MB mapped, 25.2 MB of blocks
        assert "are available" in stderr
        assert not (tmp_path / "out/config.json").exists()


class TestMemoryLimits:
    @pytest.fixture
    def roots(self, tmp_path: Path) -> dict[str, Path]:
        proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
        (proc / "self/cgroup").write_text("0::/a/b\n")
        (cgroup / "a/b").mkdir(parents=True)
        return {"proc": proc, "cgroup": cgroup}

    def test_free_memory(self, roots: dict[str, Path]) -> None:
        assert available_memory(**roots) == 8000 * 1024

    def test_a_group_or_one_above_it(self, roots: dict[str, Path]) -> None:
        inner, outer = roots["cgroup"] / "a/b", roots["cgroup"] / "a"
        (inner / "memory.max").write_text("max\n")
        (inner / "memory.current").write_text("1000\n")
        assert available_memory(**roots) == 8000 * 1024
        (outer / "memory.max").write_text("50000\n")
        (outer / "memory.current").write_text("40000\n")
        assert available_memory(**roots) == 10000
        (outer / "memory.stat").write_text("anon 1\nactive_file 2000\ninactive_file 3000\n")
        assert available_memory(**roots) == 15000

    def test_version_1(self, roots: dict[str, Path]) -> None:
        (roots["proc"] / "self/cgroup").write_text("5:cpu,cpuacct:/x\n3:memory:/c\n")
        folder = roots["cgroup"] / "memory/c"
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text("3000\n")
        (folder / "memory.usage_in_bytes").write_text("1000\n")
        assert available_memory(**roots) == 2000

    @pytest.mark.parametrize(
        ("available", "expected"), [(1000, (8, 800, 1000)), (350, (3, 300, 350)), (99, (0, 100, 99))]
    )
    def test_workers_that_fit(
        self, monkeypatch: pytest.MonkeyPatch, available: int, expected: tuple[int, int, int]
    ) -> None:
        monkeypatch.setattr(resources, "available_memory", lambda: available)
        assert fitting_workers(8, memory_each=100, largest_mapping=10**9) == expected

    def test_refusal(self, monkeypatch: pytest.MonkeyPatch, source: Source, tmp_path: Path) -> None:
        monkeypatch.setattr(resources, "available_memory", lambda: 12_000_000)
        with pytest.raises(HostError, match=r"needs 25\.2 MB of memory, 12\.0 MB are available"):
            convert(source, tmp_path / "out", dtype="auto")

    @pytest.mark.parametrize("write", [convert, convert_unified])
    def test_notice(self, monkeypatch: pytest.MonkeyPatch, source: Source, tmp_path: Path, write: Any) -> None:
        monkeypatch.setattr(resources, "available_memory", lambda: 60_000_000)
        output = Output.quiet()
        assert write(source, tmp_path / "out", dtype="auto", workers=8, output=output).workers == 2
        assert output.notices == [
            "checkpoint: 2 of 8 workers: 60.0 MB of memory are available, each worker needs 25.2 MB"
        ]


class TestDisk:
    def test_too_small_is_known_before(self, monkeypatch: pytest.MonkeyPatch, source: Source, tmp_path: Path) -> None:
        class Usage:
            free = 1000

        monkeypatch.setattr(resources.shutil, "disk_usage", lambda _folder: Usage)
        with pytest.raises(HostError, match=r"out has 0\.0 MB free, the checkpoint needs"):
            convert(source, tmp_path / "out", dtype="auto")
        assert list((tmp_path / "out").iterdir()) == []

    @pytest.mark.parametrize("workers", [1, 3])
    def test_full_halfway(self, monkeypatch: pytest.MonkeyPatch, source: Source, tmp_path: Path, workers: int) -> None:
        """Another program took the space that was free a moment ago."""
        pwrite = os.pwrite
        calls = iter(range(10**6))

        def failing(descriptor: int, data: Any, offset: int) -> int:
            if next(calls) > 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwrite(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(HostError) as caught:
            convert(source, tmp_path / "out", dtype="auto", tensor_parallel=2, workers=workers)
        assert str(tmp_path / "out/rank") in caught.value.what
        assert caught.value.why == "no space is left on the device"
        assert not (tmp_path / "out/config.json").exists()

    def test_short_writes_are_continued(self, monkeypatch: pytest.MonkeyPatch, source: Source, tmp_path: Path) -> None:
        convert(source, tmp_path / "whole", dtype="float16")
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:5000], offset))
        convert(source, tmp_path / "short", dtype="float16")
        assert (tmp_path / "whole/rank0.safetensors").read_bytes() == (
            tmp_path / "short/rank0.safetensors"
        ).read_bytes()

    def test_file_size_limit(self, tmp_path: Path) -> None:
        config = config_for()
        model = write_source(tmp_path / "model", config, hf_tensors(config))
        status, stderr, _ = run_convert(
            model,
            tmp_path / "out",
            "float32",
            1,
            limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),
        )
        assert status == 3, stderr
        assert f"{tmp_path}/out/rank0.safetensors could not be written" in stderr
        assert "file is too large" in stderr
        assert "Traceback" not in stderr

    def test_folder_that_may_not_be_written(self, source: Source, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/rank0.safetensors").mkdir()
        with pytest.raises(HostError, match=r"rank0\.safetensors could not be written"):
            convert(source, tmp_path / "out", dtype="auto")


class TestSourceThatChanges:
    def test_cut_after_the_check(self, source: Source, tmp_path: Path) -> None:
        """Reading a mapping past the end of its file would end the process with SIGBUS."""
        file = source.path / "model.safetensors"
        size = file.stat().st_size
        os.truncate(file, size - 1)
        with pytest.raises(SourceError, match=f"model.safetensors has {size - 1} bytes, {size} are needed"):
            convert(source, tmp_path / "out", dtype="auto")

    def test_gone_after_the_check(self, source: Source, tmp_path: Path) -> None:
        (source.path / "model.safetensors").unlink()
        with pytest.raises(SourceError, match=r"model\.safetensors cannot be read"):
            convert(source, tmp_path / "out", dtype="auto", workers=3)


class InterruptedOutput(Output):
    """Presses Ctrl-C after some blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__("quiet")
        self.left = blocks

    @contextmanager
    def progress(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        def advance(_bytes: int) -> None:
            self.left -= 1
            if self.left == 0:
                _thread.interrupt_main()

        yield advance


@pytest.mark.parametrize("workers", [1, 3])
def test_ctrl_c_stops_all_workers(tmp_path: Path, workers: int) -> None:
    model = sparse_source(tmp_path / "model", 1)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        convert(checked(model), tmp_path / "out", dtype="float16", workers=workers, output=InterruptedOutput(5))
    assert threading.active_count() == before
    assert not (tmp_path / "out/config.json").exists()
