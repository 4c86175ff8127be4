"""Calibration texts from a data set of the Hugging Face hub: its files are read, its code never.

The token comes from the environment, as for models.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lpxbuild.errors import HostError, LpxError, SourceError

PATIENCE_SECONDS = 8.0
"""How long the hub may take to say what it has."""
_SUFFIXES = (".parquet", ".jsonl", ".txt")
_CONVERTED = "refs/convert/parquet"
"""Branch in which the hub keeps a Parquet form of data sets that are stored otherwise."""
_LOCAL = "set quantization.calibration.dataset to a local .txt, .jsonl or .parquet file, or to builtin"
_NETWORK_LIBRARIES = ("httpx", "httpx2", "httpcore", "requests", "urllib3")

T = TypeVar("T")


@dataclass(frozen=True)
class HubDataset:
    """A data set at one commit.

    Attributes:
        commit: what its names stood for when it was asked.
        names: files of the wanted split, in their order.
    """

    id: str
    commit: str
    names: tuple[str, ...]


def find(dataset: str, split: str) -> HubDataset:
    """Ask the hub what the data set has; answers or refuses within `PATIENCE_SECONDS`.

    Raises:
        HostError: offline, or the hub cannot be reached.
        SourceError: no such data set, no access, no file that can be read without code.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise _unreachable(dataset, "HF_HUB_OFFLINE is set")
    return _soon(lambda: _translated(dataset, lambda: _find(dataset, split)), dataset)


def files(found: HubDataset) -> Iterator[Path]:
    """The split's files, downloaded one after the other into the cache that all Hugging Face tools share."""
    from huggingface_hub import hf_hub_download

    for name in found.names:
        yield Path(
            _translated(
                found.id,
                lambda name=name: hf_hub_download(  # type: ignore[misc]
                    found.id, name, repo_type="dataset", revision=found.commit, endpoint=_endpoint()
                ),
            )
        )


def _find(dataset: str, split: str) -> HubDataset:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    api = HfApi(endpoint=_endpoint())
    for revision in (None, _CONVERTED):
        try:
            info = api.dataset_info(dataset, revision=revision, timeout=PATIENCE_SECONDS)
        except RevisionNotFoundError:
            continue
        names = sorted(file.rfilename for file in info.siblings or ())
        for suffix in _SUFFIXES:
            wanted = tuple(name for name in names if name.endswith(suffix) and split in name)
            if wanted:
                return HubDataset(dataset, info.sha or "main", wanted)
    raise SourceError(
        f"calibration dataset {dataset} has no .parquet, .jsonl or .txt file of the split {split!r}",
        why="lpx reads the files of a data set and runs none of its code",
        next=f"name another quantization.calibration.split, or {_LOCAL}",
    )


def _soon(ask: Callable[[], T], dataset: str) -> T:
    """The answer of `ask`; a daemon thread, because neither name servers nor proxies keep to a time limit."""
    answers: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def work() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=work, daemon=True, name="lpx-calibration-dataset").start()
    try:
        answer, error = answers.get(timeout=PATIENCE_SECONDS)
    except queue.Empty:
        raise _unreachable(dataset, f"the hub did not answer within {PATIENCE_SECONDS:g} s") from None
    if error is not None:
        raise error
    assert answer is not None
    return answer


def _translated(dataset: str, ask: Callable[[], T]) -> T:
    """Turns the library's errors into lpx's."""
    from huggingface_hub import errors

    try:
        return ask()
    except LpxError:
        raise
    except errors.HFValidationError as error:
        raise SourceError(
            f"calibration dataset {dataset!r} is neither a file of this host nor a hub id",
            why=_line(error),
            next=_LOCAL,
        ) from None
    except errors.RepositoryNotFoundError as error:  # also gated ones
        raise SourceError(
            f"calibration dataset {dataset} is not on the hub, or asks for access that HF_TOKEN does not give",
            why=_line(error),
            next=_LOCAL,
        ) from None
    except OSError as error:
        raise _unreachable(dataset, _line(error)) from None
    except Exception as error:
        # httpx and requests have no base class in common, and are not imported for their classes.
        if type(error).__module__.split(".")[0] in (*_NETWORK_LIBRARIES, "huggingface_hub"):
            raise _unreachable(dataset, _line(error)) from None
        raise


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _unreachable(dataset: str, why: str) -> HostError:
    return HostError(f"calibration dataset {dataset} cannot be fetched", why=why, next=_LOCAL)
