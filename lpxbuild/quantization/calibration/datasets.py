"""Calibration texts: bundled, a local file, or a data set of the Hugging Face hub. Nothing asks, nothing waits."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.quantization.calibration import hub, parquet

BUILTIN = "builtin"
SUFFIXES = (".txt", ".jsonl", ".parquet")
LOCAL = "set quantization.calibration.dataset to a local .txt, .jsonl or .parquet file, or to builtin"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Texts:
    """The chosen texts.

    Attributes:
        texts: in their seeded order.
        revision: commit of a hub data set.
    """

    texts: tuple[str, ...]
    revision: str | None = None


def kind_of(dataset: str, base: Path) -> str:
    """`builtin`, `file` or `hub`.

    Raises:
        SourceError: neither a file that is there nor the form of a hub id.
    """
    if dataset == BUILTIN:
        return "builtin"
    path = local_path(dataset, base)
    if not path.exists() and not dataset.endswith(SUFFIXES) and _HUB_ID.fullmatch(dataset):
        return "hub"
    if not path.is_file():
        raise SourceError(
            f"calibration dataset {path} is no file" if path.exists() else f"no such file: {path}",
            why=f"quantization.calibration.dataset {dataset!r} is neither `builtin` nor a file that is there",
            next=LOCAL,
        )
    if path.suffix not in SUFFIXES:
        raise SourceError(
            f"calibration dataset {path} is of no known kind",
            why=f"texts are read from {', '.join(SUFFIXES)}; this one ends in {path.suffix!r}",
            next=LOCAL,
        )
    return "file"


def local_path(dataset: str, base: Path) -> Path:
    """The path of a local data set; a relative one starts from the recipe's folder."""
    return base / Path(dataset).expanduser()


def builtin_text() -> str:
    """The bundled text set: passages with empty lines between them."""
    return (resources.files("lpxbuild.quantization.calibration") / "builtin.txt").read_text(encoding="utf-8")


def builtin_passages() -> list[str]:
    """The passages of the bundled text set, in their order."""
    return [passage.strip("\n") for passage in builtin_text().split("\n\n") if passage.strip()]


def digest(dataset: str, base: Path) -> str:
    """What identifies the texts without downloading any: a SHA-256, or the hub id."""
    kind = kind_of(dataset, base)
    if kind == "builtin":
        return f"builtin:{hashlib.sha256(builtin_text().encode()).hexdigest()}"
    if kind == "hub":
        return f"hub:{dataset}"
    found = hashlib.sha256()
    with local_path(dataset, base).open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def check_dataset(settings: Any, *, base: Path, python: Path | None) -> None:
    """Refuse a data set that cannot be read, before anything expensive: a local file must begin with a text.

    Raises:
        SourceError: no such file, an empty one, another form.
        HostError: a data set of the hub that this host cannot reach.
    """
    kind = kind_of(settings.dataset, base)
    if kind == "hub":
        hub.find(settings.dataset, settings.split)
    elif kind == "file":
        rows = _rows(local_path(settings.dataset, base), settings.column, python)
        _not_empty(next((row for row in rows if row.strip()), None), settings.dataset)


def read_texts(settings: Any, *, base: Path, python: Path | None) -> Texts:
    """As many texts as the recipe asks for, chosen by its seed from all that the data set has.

    Args:
        settings: the recipe's `quantization.calibration`.
        base: folder of the recipe.
        python: interpreter that can read Parquet.

    Raises:
        SourceError, HostError: as `check_dataset`.
    """
    kind = kind_of(settings.dataset, base)
    revision = None
    rows: Iterable[str]
    if kind == "builtin":
        rows = builtin_passages()
    elif kind == "file":
        rows = _rows(local_path(settings.dataset, base), settings.column, python)
    else:
        found = hub.find(settings.dataset, settings.split)
        revision = found.commit
        rows = (row for file in hub.files(found) for row in _rows(file, settings.column, python))
    texts = chosen((row for row in rows if row.strip()), settings.samples, settings.seed)
    _not_empty(texts, settings.dataset)
    return Texts(tuple(texts), revision)


def chosen(texts: Iterable[str], count: int, seed: int) -> list[str]:
    """`count` of the texts, each with the same chance, in a random order; holds no more than that many."""
    source = random.Random(seed)
    kept: list[str] = []
    for number, text in enumerate(texts):
        if number < count:
            kept.append(text)
        elif (place := source.randrange(number + 1)) < count:
            kept[place] = text
    source.shuffle(kept)
    return kept


def _not_empty(texts: Any, dataset: str) -> None:
    if not texts:
        raise SourceError(
            f"calibration dataset {dataset} has no text",
            why="it is empty, or every line of it is",
            next=LOCAL,
        )


def _rows(path: Path, column: str, python: Path | None) -> Iterator[str]:
    """Lines of a .txt, the field `column` of each line of a .jsonl, the column of a .parquet."""
    try:
        if path.suffix == ".parquet":
            yield from parquet.column(path, column, python)
            return
        with path.open(encoding="utf-8") as lines:
            if path.suffix == ".txt":
                yield from lines
            else:
                yield from _fields(path, lines, column)
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"calibration dataset {path} cannot be read",
            why=str(error),
            next="give a file of UTF-8 text that this user can read",
        ) from error


def _fields(path: Path, lines: Iterable[str], column: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{path}, line {number} is not JSON",
                why=str(error),
                next="write one JSON object on each line",
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            known = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise SourceError(
                f"{path}, line {number} has no text in the field {column!r}",
                why=f"found: {known or 'an empty object'}",
                next="name the field in quantization.calibration.column",
            )
        yield row[column]
