"""Unchanged rebuild: wall time of `lpx build` when there is nothing to do, beside the interpreter's own start.

Builds the demo's SmolLM2 once, smoke test and all (`--tiny`: a case of the tests), then alternates `lpx build` with
`python -c pass`; prints median, quartiles and n of the times and of their pairwise ratio. Bound: 1 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
BOUND_SECONDS = 1.0


def timed(command: list[str], environment: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def spread(values: list[float], unit: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"median {middle:.3f}{unit}, quartiles {low:.3f}-{high:.3f}{unit}, n={len(values)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="a 0.2 MB model instead of SmolLM2-135M")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lpx-rebuild-") as folder:
        recipe = HERE / "recipes" / "smollm2-135m-int8-tp3.yaml"
        if options.tiny:
            recipe = Path(folder) / "tiny.yaml"
            source = HERE / "tests" / "cases" / "data" / "baseline_tp2"
            recipe.write_text(
                f"name: tiny\nmodel: {{source: {source}}}\nlimits: {{max_input_len: 64, max_seq_len: 96}}\n"
            )
        environment = os.environ | {"LPX_CACHE": str(Path(folder) / "cache")}
        build = [sys.executable, "-m", "lpxbuild", "build", str(recipe)]
        build += ["--build-dir", str(Path(folder) / "build")]
        first = timed(build, environment)
        empty = [sys.executable, "-c", "pass"]
        rebuilds, starts = [], []
        for _ in range(options.rounds):
            rebuilds.append(timed(build, environment))
            starts.append(timed(empty, environment))
    print(f"first build                 {first:.2f} s")
    print(f"unchanged rebuild           {spread(rebuilds, ' s')}")
    print(f"python -c pass              {spread(starts, ' s')}")
    print(f"rebuild / python -c pass    {spread([a / b for a, b in zip(rebuilds, starts)], 'x')}")
    median = statistics.median(rebuilds)
    print(f"bound {BOUND_SECONDS:.1f} s: {'met' if median <= BOUND_SECONDS else 'missed'}")
    return 0 if median <= BOUND_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
