"""What `model.source` stands for, and the digests of the files behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lpxbuild.errors import SourceError, UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline.digest import RememberedDigests
from lpxbuild.pipeline.placing import write_atomically

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe

Kind = Literal["folder", "gguf", "hub"]

SNAPSHOTS = "snapshots.json"
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class SourceInput:
    """The resolved source of a recipe.

    Attributes:
        origin: the recipe's own text; what checkpoints and messages call the source.
        location: what `lpxbuild.source.fetch` takes: an absolute path, or the hub id.
        revision: the recipe's, or the commit that a lock file pins.
    """

    kind: Kind
    origin: str
    location: str
    revision: str | None

    @property
    def path(self) -> Path:
        """The folder or file of a local source."""
        return Path(self.location)


def resolve(source: str, revision: str | None, *, base: Path) -> SourceInput:
    """Tell folder, `.gguf` file and hub id apart.

    Args:
        source: `model.source`.
        revision: `model.revision`.
        base: folder that relative paths start from (the recipe's).

    Raises:
        SourceError, HostError: a file that is not there, or a Python package that is not installed.
    """
    from lpxbuild.source.folder import is_repository
    from lpxbuild.source.package import PREFIX, find_in_package

    if source.startswith(PREFIX):
        return SourceInput("gguf", source, str(find_in_package(source)), None)
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~somebody, and nobody of that name is here
        path = Path(source)
    path = path if path.is_absolute() else base / path
    if source.endswith(".gguf") and not path.is_dir():
        if not path.is_file():
            raise SourceError(f"{path.absolute()} does not exist", next="correct model.source in the recipe")
        return SourceInput("gguf", source, str(path.absolute()), None)
    if path.exists() or not is_repository(source):
        return SourceInput("folder", source, str(path.absolute()), None)
    return SourceInput("hub", source, source, revision)


def source_files(folder: Path) -> list[str]:
    """Names of the files in a Hugging Face folder that a build depends on, as present, sorted."""
    from lpxbuild.source import folder as names

    configs = {
        names.CONFIG,
        names.GENERATION_CONFIG,
        names.INDEX,
        names.ADAPTER_CONFIG,
        *names.TOKENIZER_FILES,
        *names.SLOW_TOKENIZER_FILES,
        *names.QUANTIZATION_FILES,
    }
    present = {name for name in configs if (folder / name).is_file()}
    weights = {names.WEIGHTS}
    if names.INDEX in present:
        try:
            weight_map = json.loads((folder / names.INDEX).read_bytes())["weight_map"]
            weights = {Path(str(name)).name for name in weight_map.values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            weights = set()  # lpxbuild.source.check says what is wrong with the index
    return sorted(present | {name for name in weights if (folder / name).is_file()})


def digests(
    path: Path,
    remembered: RememberedDigests,
    *,
    fresh: bool,
    save: bool = True,
    before_reading: Callable[[], None] | None = None,
    output: Output | None = None,
) -> dict[str, str]:
    """SHA-256 per file of a source: a Hugging Face folder, or one `.gguf`.

    Files in the hub's own cache are links to blobs that carry their SHA-256 as name; those are not read again.

    Raises:
        SourceError: a file cannot be read.
    """
    try:
        if path.is_file():
            return remembered.digests(path.parent, [path.name], fresh=fresh, save=save, output=output)
        names = source_files(path)
        known = hub_digests(path, names)
        return remembered.digests(
            path, names, known=known, fresh=fresh, save=save, before_reading=before_reading, output=output
        )
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(
            path.parent if path.is_file() else path
        ):
            raise  # the place where digests are remembered
        raise SourceError(
            f"{error.filename or path} cannot be read: {error.strerror}", next=f"ls -l {error.filename or path}"
        ) from error


def hub_digests(folder: Path, names: list[str]) -> Mapping[str, str]:
    """Digests that the hub gave when it sent the files."""
    from lpxbuild.source.checks import hub_sha256

    known = {name: hub_sha256(folder / name) for name in names}
    return {name: sha256 for name, sha256 in known.items() if sha256 is not None}


def commit_of(folder: Path) -> str | None:
    """The commit that the hub's client recorded for a folder, None for a folder that it did not make."""
    from lpxbuild.source.checks import hub_revision

    return hub_revision(folder)


def snapshot(given: SourceInput, store: Path) -> Path | None:
    """The folder of an earlier download of exactly this commit, so that an unchanged build asks no network."""
    if given.revision is None or not COMMIT.fullmatch(given.revision):
        return None
    try:
        remembered = json.loads((store / SNAPSHOTS).read_text(encoding="utf-8"))[f"{given.origin}@{given.revision}"]
        folder, names = Path(remembered["folder"]), list(remembered["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder if folder.is_dir() and source_files(folder) == names else None


def remember_snapshot(given: SourceInput, folder: Path, store: Path) -> None:
    """Note where a commit of the hub lies on this host."""
    commit = commit_of(folder)
    if commit is None:
        return
    place = store / SNAPSHOTS
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        known = {}
    known = known if isinstance(known, dict) else {}
    known[f"{given.origin}@{commit}"] = {"folder": str(folder), "files": source_files(folder)}
    store.mkdir(parents=True, exist_ok=True)
    write_atomically(place, json.dumps(known, indent=1), durable=False)


def recipe_text(recipe: Recipe, path: Path | None) -> str:
    """The recipe's own text, or its contents as JSON (which is YAML) where it came from Python."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"recipe {path} cannot be read: {error.strerror}", next=f"ls -l {path}") from error
    return json.dumps(recipe.model_dump(mode="json", exclude_unset=True), indent=2, ensure_ascii=False) + "\n"


def refuse_changed(place: Path, files: Mapping[str, str], remembered: RememberedDigests, *, origin: str) -> None:
    """Refuse a source whose files are not those that `files` has digests of any more.

    Raises:
        SourceError: names what changed.
    """
    now = digests(place, remembered, fresh=False, save=False)
    changed = sorted(name for name in files.keys() | now.keys() if files.get(name) != now.get(name))
    if changed:
        raise SourceError(
            f"{changed[0]} of {origin} changed while it was read",
            why=f"changed in {place}: {', '.join(changed[:8])}",
            next="run the same command again when nothing writes there any more",
        )
