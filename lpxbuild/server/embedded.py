"""Find the embedded tritonserver (the one in the `nvidia-pytriton` wheel) and what it needs to run.

Facts that shape this file, tried with tritonserver 2.51: the Python stub ignores PYTHONPATH and takes its prefix from
the first `python3` in PATH; the server needs the wheel's own libraries and libpython in LD_LIBRARY_PATH; the stub must
be the one of this very Python version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lpxbuild.errors import HostError

SUPPORTED_PYTHONS = ((3, 10), (3, 11), (3, 12))
INSTALL_EMBEDDED = "pip install 'lpxbuild[embedded]'"
# PATH's python3 answers for every stub, so a BLS model may be served where that is 3.11 only (see bls_is_safe).
BLS_PYTHON = (3, 11)


@dataclass(frozen=True)
class EmbeddedServer:
    """A tritonserver that can be started.

    Attributes:
        binary: the `tritonserver` executable.
        backends: value of `--backend-directory`, holding `python/` with the stub of this Python.
        interpreter: the Python that the stubs run on.
        library_path: value of LD_LIBRARY_PATH.
        version: of the wheel, e.g. "0.7.0" (tritonserver 2.51).
    """

    binary: Path
    backends: Path
    interpreter: Path
    library_path: str
    version: str

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The process environment of the server: `base` (default: ours) with PATH and LD_LIBRARY_PATH set."""
        environment = dict(os.environ if base is None else base)
        environment["PATH"] = f"{self.interpreter.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        environment["LD_LIBRARY_PATH"] = self.library_path
        environment.pop("PYTHONPATH", None)
        environment.pop("PYTHONHOME", None)
        return environment


def bls_is_safe() -> bool:
    """Whether `tensorrt_llm_bls` may be served by this interpreter.

    `exec(decoupled=True)` ends the 2.51 stub with a segmentation fault on Python 3.12, often the whole server with it.
    """
    return sys.version_info[:2] == BLS_PYTHON


def find(cache: Path | None = None) -> EmbeddedServer:
    """Locate the embedded server and assemble its backend directory.

    Args:
        cache: folder for the backend directory; default `$LPX_CACHE`, else `$XDG_CACHE_HOME/lpx`, else `~/.cache/lpx`.

    Raises:
        HostError: wrong Python, extra not installed, numpy 2, no shared libpython.
    """
    python = _check_python()
    package = _wheel_folder()
    wheel_version = _check_versions()
    triton = package / "tritonserver"
    stub = triton / "python_backend_stubs" / python / "triton_python_backend_stub"
    for path in (triton / "bin" / "tritonserver", triton / "backends" / "python", stub):
        if not path.exists():
            raise HostError(
                f"nvidia-pytriton {wheel_version} in {package} has no {path.relative_to(package)}",
                why="the installed wheel is not the one that lpx was tried with (0.7.0), or is damaged",
                next=f"{sys.executable} -m pip install --force-reinstall --no-deps nvidia-pytriton==0.7.0",
            )
    return EmbeddedServer(
        binary=triton / "bin" / "tritonserver",
        backends=_assemble_backends(triton, stub, cache or _cache_folder(), f"pytriton-{wheel_version}-py{python}"),
        interpreter=_interpreter(),
        library_path=os.pathsep.join([str(package.parent / "nvidia_pytriton.libs"), str(_libpython_folder())]),
        version=wheel_version,
    )


def _check_python() -> str:
    found = sys.version_info[:2]
    if found not in SUPPORTED_PYTHONS:
        raise HostError(
            f"the embedded server does not run on Python {found[0]}.{found[1]}",
            why="nvidia-pytriton 0.7.0 needs numpy < 2 and is used on Python 3.10, 3.11 or 3.12",
            next=f"make a virtual environment of Python 3.11 and there: {INSTALL_EMBEDDED}",
        )
    return f"{found[0]}.{found[1]}"


def _wheel_folder() -> Path:
    # find_spec of a top-level package does not import it: pytriton's own import starts threads and takes a second.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise HostError(
            "the embedded Triton server is not installed",
            why="package nvidia-pytriton was not found in this Python",
            next=INSTALL_EMBEDDED,
        )
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def _check_versions() -> str:
    try:
        wheel = version("nvidia-pytriton")
        numpy = version("numpy")
    except PackageNotFoundError as error:
        raise HostError(f"package {error.name} is not installed in this Python", next=INSTALL_EMBEDDED) from error
    if int(numpy.split(".")[0]) >= 2:
        raise HostError(
            f"numpy {numpy} is installed; the embedded server needs numpy < 2",
            why="the Python backend of Triton 2.51 was built against numpy 1: its models would read garbage or crash",
            next=INSTALL_EMBEDDED,
        )
    return wheel


def _interpreter() -> Path:
    """The interpreter as it was called (a virtual environment's, not the one behind its link), named `python3`."""
    python3 = Path(sys.executable).parent / "python3"
    if not python3.exists() or python3.resolve() != Path(sys.executable).resolve():
        raise HostError(
            f"{python3} is not the interpreter that runs lpx ({sys.executable})",
            why="Triton's Python stub takes its packages from the first `python3` in PATH",
            next=f"run lpx from a virtual environment: {sys.executable} -m venv .venv",
        )
    return python3


def _libpython_folder() -> Path:
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    candidates = [
        Path(str(sysconfig.get_config_var("LIBDIR") or "/usr/lib")),
        Path(sys.base_prefix) / "lib",
        Path("/usr/local/lib"),
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/usr/lib64"),
    ]
    for folder in candidates:
        if (folder / name).exists():
            return folder
    raise HostError(
        f"{name} was not found",
        why=f"Triton's Python stub links to it; looked in {', '.join(map(str, candidates))}",
        next=f"install the shared library of this Python, e.g. apt-get install libpython3.{sys.version_info[1]}",
    )


def _cache_folder() -> Path:
    if configured := os.environ.get("LPX_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lpx"


def _assemble_backends(triton: Path, stub: Path, cache: Path, label: str) -> Path:
    """`<cache>/triton/<label>-<hash of the wheel's place>/python`: links to the backend and to the stub.

    The wheel keeps them apart; Triton wants them in one folder. Links, so that a reinstalled wheel is picked up.
    """
    place = hashlib.sha256(str(triton).encode()).hexdigest()[:8]
    target = cache.absolute() / "triton" / f"{label}-{place}"
    folder = target / "python"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sources = [file for file in (triton / "backends" / "python").iterdir() if file.is_file()]
        for source in [*sources, stub]:
            link = folder / source.name
            if not link.is_symlink() or link.readlink() != source:
                # Renamed into place: two servers may start at the same moment.
                fresh = folder / f".{source.name}.{os.getpid()}"
                fresh.unlink(missing_ok=True)
                fresh.symlink_to(source)
                fresh.replace(link)
    except OSError as error:
        raise HostError(
            f"cannot write the backend directory {target}: {error.strerror}",
            next="set LPX_CACHE to a folder that you can write to",
        ) from error
    return target
