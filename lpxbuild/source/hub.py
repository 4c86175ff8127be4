"""Models of the Hugging Face hub: pinned, only the needed files, checked against the hub's own sizes.

Works with huggingface_hub 0.36 (requests) and 1.x, 2.x (httpx). The token comes from the environment only.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lpxbuild.errors import HostError, LpxError, SourceError
from lpxbuild.output import Output
from lpxbuild.source.checks import check_config
from lpxbuild.source.code import code_names
from lpxbuild.source.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    QUANTIZATION_FILES,
    SLOW_TOKENIZER_FILES,
    TOKENIZER_FILES,
    WEIGHTS,
)
from lpxbuild.source.resume import preload

SMALL_FILES = (
    *(CONFIG, GENERATION_CONFIG, INDEX, ADAPTER_CONFIG),
    *(*QUANTIZATION_FILES, *TOKENIZER_FILES, *SLOW_TOKENIZER_FILES),
)
_PARALLEL_DOWNLOADS = 4
_SPARE_BYTES = 256 << 20  # left free beside the download


@dataclass(frozen=True)
class _Repository:
    """One repository at one commit: sizes of its files in bytes."""

    id: str
    commit: str
    sizes: dict[str, int | None]  # None where a mirror does not tell
    options: dict[str, Any]  # of every hf_hub_download call


def fetch_repository(
    repository: str,
    revision: str | None,
    *,
    destination: Path | None,
    accept: Callable[[Path], object] = check_config,
    output: Output,
) -> Path:
    """Download a model; what is there already, or partly, is not loaded again.

    Args:
        repository: hub id, `organisation/name`.
        revision: branch, tag or commit; None means `main`. The commit it stands for is what is downloaded.
        destination: folder for the files; None means the cache that all Hugging Face tools share.
        accept: refuses a model by its small files, before its weights are downloaded.

    Returns:
        The folder; its commit is readable by `checks.hub_revision`.

    Raises:
        SourceError: repository, revision or files are missing, access is gated, the kind of model is refused.
        HostError: no network, offline and not cached, no disk space.
    """
    if destination is None and _offline():
        return _cached(repository, revision or "main")
    with _translated(repository, revision, destination):
        found = _look_up(repository, revision, destination)
        small = [name for name in SMALL_FILES if name in found.sizes]
        if CONFIG not in found.sizes and ADAPTER_CONFIG not in found.sizes:
            raise _no_config(found)
        if CONFIG in found.sizes and not _same_commit(found, revision):
            _download(found, CONFIG, revision or "main")  # lets the cache know the commit of this name, for offline use
        folder = Path(_download(found, small[0])).parent
        for name in small[1:]:
            _download(found, name)
        code = code_names(folder, found.sizes)
        for name in code:
            _download(found, name)
        small += code
        accept(folder)  # refuse before gigabytes are on their way
        weights = _weight_files(folder, found)
        total = sum(found.sizes[name] or 0 for name in weights if not (folder / name).exists())
        _check_space(folder, total)
        output.step(f"source: {repository} at {found.commit[:12]}, {len(small) + len(weights)} files")
        with (
            output.progress(f"download {repository}", total or None) as advance,
            _watch(folder, advance),
        ):
            _download_all(found, folder, weights)
    for name in (*small, *weights):
        size = (folder / name).stat().st_size
        if found.sizes[name] not in (None, size):
            raise SourceError(
                f"{name} has {size} bytes, the hub says {found.sizes[name]}",
                why="the download was cut short or the file was changed afterwards",
                next=f"remove {(folder / name).resolve()} and run the command again",
            )
    return folder


def fetch_small(repository: str, revision: str | None, names: tuple[str, ...]) -> tuple[Path, str]:
    """Some small files of a repository, as far as it has them, and the commit; weights stay on the hub.

    Raises:
        SourceError, HostError: as `fetch_repository`.
    """
    if _offline():
        folder = _cached(repository, revision or "main")
        return folder, folder.name
    with _translated(repository, revision, None):
        found = _look_up(repository, revision, None)
        present = [name for name in names if name in found.sizes]
        if CONFIG not in present:
            raise _no_config(found)
        files = [Path(_download(found, name)) for name in present]
        return files[0].parent, found.commit


def _look_up(repository: str, revision: str | None, destination: Path | None) -> _Repository:
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # lpx shows its own, and says itself what went wrong
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    options: dict[str, Any] = {"token": _token(), "endpoint": os.environ.get("HF_ENDPOINT") or None}
    info = HfApi(**options).model_info(repository, revision=revision, files_metadata=True)
    if info.sha is None:
        raise SourceError(f"the hub names no commit for {repository}", next="try again, or pin model.revision")
    if destination is not None:
        options["local_dir"] = destination
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    return _Repository(repository, info.sha, sizes, options)


def _download(found: _Repository, name: str, revision: str | None = None) -> str:
    from huggingface_hub import hf_hub_download

    return str(hf_hub_download(found.id, name, revision=revision or found.commit, **found.options))


def _download_all(found: _Repository, folder: Path, names: list[str]) -> None:
    def one(name: str) -> None:
        access = {"token": found.options["token"], "endpoint": found.options["endpoint"]}
        preload(found.id, name, commit=found.commit, folder=folder, **access)
        _download(found, name)

    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def work() -> None:
        while True:
            try:
                one(waiting.get_nowait())
            except queue.Empty:
                return
            except BaseException as error:
                ended.put(error)
                return
            ended.put(None)

    # Daemons, not an executor: Ctrl-C has to end the program at once, not after the files under way.
    for number in range(min(_PARALLEL_DOWNLOADS, len(names))):
        threading.Thread(target=work, daemon=True, name=f"lpx-download-{number}").start()
    for _ in names:
        error = ended.get()
        if error is not None:
            raise error


def _weight_files(folder: Path, found: _Repository) -> list[str]:
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise SourceError(
                f"{INDEX} of {found.id} has no weight_map", next="report it to the model's owner"
            ) from None
        for name in names:
            # As `folder.read_tensors` refuses them, but before anything is written under such a name.
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise SourceError(
                    f"{INDEX} of {found.id} names {name!r}, not a safetensors file of the top folder",
                    why="the index is broken",
                    next="report it to the model's owner, or give another revision as model.revision",
                )
    else:
        names = [WEIGHTS]
    missing = [name for name in names if name not in found.sizes]
    if missing:
        raise SourceError(
            f"{found.id} has no {missing[0]} at revision {found.commit}",
            why=f"lpx reads safetensors weights; the repository holds {_listing(found.sizes)}",
            next="name a repository with safetensors weights, or a .gguf file on this host",
        )
    return names


def _cached(repository: str, revision: str) -> Path:
    """The folder of an earlier download, when the environment says to stay offline."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(repository, CONFIG, revision=revision)
    except ValueError as error:
        raise _not_an_id(repository, error) from None
    if not isinstance(file, str):
        raise HostError(
            f"{repository} at revision {revision} is not in the cache of this host, and HF_HUB_OFFLINE is set",
            why="nothing is downloaded in offline mode",
            next=f"unset HF_HUB_OFFLINE; or on a host with network: hf download {repository} --revision {revision}",
        )
    return Path(file).parent


def _same_commit(found: _Repository, revision: str | None) -> bool:
    return revision == found.commit or "local_dir" in found.options


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _token() -> str | bool:
    """The token of the environment or of a file: `HF_TOKEN_PATH`, else what `hf auth login` wrote below `HF_HOME`.

    False keeps the library from looking elsewhere.
    """
    given = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if given:
        return given.strip() or False
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    file = Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token").expanduser()
    try:
        return file.read_text(encoding="utf-8").strip() or False
    except (OSError, UnicodeDecodeError):
        return False


def _check_space(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if wanted and free < wanted + _SPARE_BYTES:
        raise HostError(
            f"not enough disk space for the download: {wanted / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free",
            why=f"the files go to {folder}",
            next="free some space, or set HF_HOME to a folder on a larger disk",
        )


@contextmanager
def _watch(folder: Path, advance: Any) -> Iterator[None]:
    """Moves a progress bar by what has arrived on disk: the same for every version and transport of the library."""
    root = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    stop = threading.Event()

    def arrived() -> int:
        total = 0
        for base, _folders, names in os.walk(root):
            for name in names:
                try:
                    total += os.lstat(os.path.join(base, name)).st_size  # noqa: PTH118 - called often
                except OSError:
                    continue  # renamed meanwhile
        return total

    def run() -> None:
        seen = arrived()
        while not stop.wait(0.5):
            now = arrived()
            if now > seen:
                advance(now - seen)
                seen = now

    thread = threading.Thread(target=run, daemon=True, name="lpx-download-progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _translated(repository: str, revision: str | None, destination: Path | None) -> Iterator[None]:
    """Turns the library's errors into lpx's; the library's classes are the same in 0.36 and 2.x."""
    from huggingface_hub import errors

    try:
        yield
    except LpxError:
        raise
    except errors.GatedRepoError:
        raise SourceError(
            f"access to {repository} is gated",
            why="its owner wants the licence accepted, and a token of that account"
            + ("" if _token() else "; HF_TOKEN is not set"),
            next=f"accept the licence at {_page(repository)}, then: export HF_TOKEN=hf_…",
        ) from None
    except errors.RevisionNotFoundError:
        raise SourceError(
            f"{repository} has no revision {revision!r}",
            why="a revision is a branch, a tag or a commit",
            next=f"choose one of {_page(repository)}/commits/main",
        ) from None
    except errors.RepositoryNotFoundError:
        raise SourceError(
            f"the hub has no model {repository}, or it is private",
            why="no such repository for this account" + ("" if _token() else "; HF_TOKEN is not set"),
            next=f"check the spelling at {_page(repository)}; for a private model: export HF_TOKEN=hf_…; "
            "for a folder on this host give its path",
        ) from None
    except errors.HFValidationError as error:
        raise _not_an_id(repository, error) from None
    except errors.HfHubHTTPError as error:
        _raise_status(repository, error)
    except errors.LocalEntryNotFoundError as error:
        raise _no_network(repository, error.__cause__ or error) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostError(
                f"no space left on the disk while {repository} was downloaded",
                why=str(error),
                next="free some space and run the command again: it goes on where it stopped",
            ) from None
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise HostError(
                f"the download folder cannot be written: {error.filename or destination}",
                why=str(error),
                next="set HF_HOME to a folder that is yours",
            ) from None
        raise _no_network(repository, error) from None
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
            raise _no_network(repository, error) from None
        raise


def _raise_status(repository: str, error: Any) -> NoReturn:
    status = getattr(error.response, "status_code", None)
    if status in (401, 403):
        raise SourceError(
            f"the hub refused access to {repository} (HTTP {status})",
            why="the token is wrong, expired or lacks the right to read this repository",
            next="export HF_TOKEN=hf_… with a token that may read it",
        ) from None
    raise HostError(
        f"the hub answered HTTP {status} for {repository}",
        why=str(error).splitlines()[0],
        next="try again later; what was downloaded is kept",
    ) from None


def _no_config(found: _Repository) -> SourceError:
    return SourceError(
        f"{found.id} has no {CONFIG} at revision {found.commit}",
        why=f"it holds {_listing(found.sizes)}",
        next="name a repository of a Hugging Face model with safetensors weights",
    )


def _no_network(repository: str, error: BaseException) -> HostError:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return HostError(
        f"{repository} cannot be downloaded: no connection to {endpoint}",
        why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}",
        next="check the network; HF_ENDPOINT names a mirror, HF_HUB_OFFLINE=1 uses what is cached, "
        "a downloaded folder can be given by its path",
    )


def _not_an_id(repository: str, error: Exception) -> SourceError:
    return SourceError(
        f"{repository!r} is neither a file or folder of this host nor a hub id",
        why=str(error).splitlines()[0],
        next="give organisation/name, a folder or a .gguf file",
    )


def _page(repository: str) -> str:
    return f"{(os.environ.get('HF_ENDPOINT') or 'https://huggingface.co').rstrip('/')}/{repository}"


def _listing(sizes: dict[str, int | None]) -> str:
    names = sorted(sizes)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"
