"""`lpx --version`: lpx, and what shapes its results."""

from __future__ import annotations

import platform
from importlib import metadata

from lpxbuild import __version__

PACKAGES = (
    ("numpy", "numpy"),
    ("safetensors", "safetensors"),
    ("tokenizers", "tokenizers"),
    ("huggingface-hub", "huggingface-hub"),
    ("tritonclient", "tritonclient"),
    ("openvino", "openvino (embedded engine)"),
    ("openvino-genai", "openvino-genai (embedded engine)"),
    ("nvidia-pytriton", "nvidia-pytriton (embedded tritonserver 2.51)"),
    ("gguf", "gguf"),
)


def versions() -> dict[str, str | None]:
    """Distribution → version; None where it is not installed."""
    found: dict[str, str | None] = {"lpx": __version__, "python": platform.python_version()}
    for package, _label in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def text() -> str:
    """One line per version."""
    found = versions()
    lines = [f"lpx {__version__}", f"python {found['python']} on {platform.system()} {platform.machine()}"]
    for package, label in PACKAGES:
        lines.append(f"{label} {found[package] or '(not installed)'}")
    lines.append("TensorRT-LLM checkpoint layout: 1.0-1.2.1; derived from its sources, never executed by this project")
    return "\n".join(lines)
