"""The hub tests once more with huggingface_hub 0.36 (requests), which .venv-ref has; elsewhere it is the newest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OLDER = "0.36."


def test_the_same_with_huggingface_hub_0_36(reference_python: Path, tmp_path: Path) -> None:
    (packages,) = reference_python.parents[1].glob("lib/python3*/site-packages")
    for name in ("huggingface_hub", "requests", "urllib3", "idna", "charset_normalizer", "certifi"):
        (tmp_path / name).symlink_to(packages / name)
    (metadata,) = packages.glob("huggingface_hub-*.dist-info")
    (tmp_path / metadata.name).symlink_to(metadata)
    code = "import huggingface_hub, sys; print(huggingface_hub.__version__, huggingface_hub.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(OLDER)
    tests = Path(__file__).with_name("test_source_hub.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
