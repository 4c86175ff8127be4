"""A text column of a Parquet file, read by pyarrow in the interpreter that calibrates: the base install has none."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lpxbuild.errors import HostError, SourceError
from lpxbuild.quantization.calibration.interpreter import interpreter

_PROGRAM = """
import json, sys
try:
    import pyarrow.parquet as parquet
except ImportError:
    sys.exit(3)
try:
    file = parquet.ParquetFile(sys.argv[1])
    names = file.schema_arrow.names
    print(json.dumps(names))
    if sys.argv[2] in names:
        for batch in file.iter_batches(batch_size=256, columns=[sys.argv[2]]):
            for value in batch.column(0).to_pylist():
                if isinstance(value, str):
                    print(json.dumps(value))
except (OSError, ValueError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
_NO_PYARROW = 3


def column(path: Path, name: str, python: Path | None) -> Iterator[str]:
    """The texts of one column, row by row.

    Raises:
        HostError: the interpreter has no pyarrow.
        SourceError: no Parquet file, or not this column.
    """
    child = interpreter(python)
    process = subprocess.Popen(
        [child, "-I", "-c", _PROGRAM, str(path), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        columns = process.stdout.readline()
        if columns and name not in (names := json.loads(columns)):
            raise SourceError(
                f"{path} has no column {name!r}",
                why=f"its columns: {', '.join(names)}",
                next="name the column in quantization.calibration.column",
            )
        for line in process.stdout:
            yield json.loads(line)
        said = process.stderr.read()
        status = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    if status == _NO_PYARROW:
        raise HostError(
            f"{path.name} cannot be read: {child} has no pyarrow",
            why="Parquet files are read in the interpreter that calibrates",
            next=f"{child} -m pip install pyarrow, or give the texts as .jsonl",
        )
    if status != 0:
        last = said.strip().splitlines()[-1:] or [f"status {status}"]
        raise SourceError(
            f"{path} cannot be read as Parquet", why=last[0], next="give a whole .parquet file, or a .txt or .jsonl"
        )
