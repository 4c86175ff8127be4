"""YAML → Recipe, with the line of every key kept for error messages."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from lpxbuild.errors import RecipeError
from lpxbuild.recipe.schema import Recipe

KeyPath = tuple[str | int, ...]

VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{")
"""`${NAME}`, `${NAME:-default}`; `$$` stands for one dollar sign; anything else after `${` is a mistake."""

SECRETS = frozenset(("TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "APIKEY", "CREDENTIAL", "CREDENTIALS", "AUTH"))
"""Words in the name of a variable that holds a secret."""

LARGEST = 100_000
"""Values that a recipe has at most, aliases counted as often as they are used."""

DEEPEST = 50

ADVICE = "mend the line; a recipe is `key: value` lines, see docs/recipe-reference.md"

FORMER_KEYS: Mapping[str, str] = {
    "max_output_len": "TensorRT-LLM has no max_output_len any more: set limits.max_seq_len to max_input_len + the "
    "longest answer",
    "tp_size": "the key is parallel.tensor",
    "tp": "the key is parallel.tensor",
    "pp_size": "the key is parallel.pipeline",
    "qformat": "the key is quantization.format",
    "kv_cache_dtype": "the key is quantization.kv_cache",
    "engine": "the key is backend",
    "tokenizer_dir": "the tokenizer is taken from model.source",
}
"""Keys that people bring from other tools, with what to write instead."""


def load(path: Path, overrides: list[str]) -> Recipe:
    """Read, interpolate, override and validate one recipe (see `Recipe.load`)."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise RecipeError(f"recipe {path} is {kind}, not a file", next="give a UTF-8 YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(
            f"recipe {path} does not exist",
            why=f"it is a link to {path.readlink()}" if path.is_symlink() else _neighbours(path),
            next="lpx recipes   (lists the shipped ones)   or   lpx init SOURCE",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not UTF-8 text"
        raise RecipeError(f"recipe {path} {what}", why=str(error), next="give a UTF-8 YAML file") from error
    return parse(text, str(path), overrides)


def parse(text: str, name: str, overrides: list[str]) -> Recipe:
    """Validate recipe text; `name` is what messages call the file."""
    document = _Document(text, name)
    for override in overrides:
        document.override(override)
    try:
        return Recipe.model_validate(document.data)
    except ValidationError as error:
        raise document.explain(error) from error


class _Document:
    """Plain data of a YAML file, with the place of every key."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.places: dict[KeyPath, str] = {}
        self.left = LARGEST
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except RecursionError:
            raise RecipeError(f"{name}: nested too deeply", next=ADVICE) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f"{name}:{mark.line + 1}" if mark is not None else name
            raise RecipeError(
                f"{place}: not valid YAML",
                why=str(getattr(error, "problem", None) or error),
                next="write `key: ${NAME}` on a line of its own, not inside { }" if "${" in text else ADVICE,
            ) from error
        if not isinstance(root, yaml.MappingNode):
            raise RecipeError(
                f"{name}: a recipe is a mapping of keys, found {'nothing' if root is None else 'another value'}",
                why="the smallest recipe has the keys `name` and `model`",
                next="lpx init SOURCE   writes a first recipe",
            )
        self.data: dict[str, Any] = self._plain(root, ())

    def _plain(self, node: yaml.Node, path: KeyPath) -> Any:
        place = self.places.setdefault(path, f"{self.name}:{node.start_mark.line + 1}")
        # Aliases make a few lines endless (`&a [*a]`) or billions of values.
        self.left -= 1
        if self.left < 0 or len(path) > DEEPEST:
            raise RecipeError(f"{place}: too large for a recipe, or an alias that holds itself", next=ADVICE)
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                line = key_node.start_mark.line + 1
                if not isinstance(key_node, yaml.ScalarNode):
                    raise RecipeError(f"{self.name}:{line}: a key is one word, found a list or mapping", next=ADVICE)
                key = str(key_node.value)
                if key == "<<":
                    raise RecipeError(
                        f"{self.name}:{line}: merge keys (`<<`) are not supported in a recipe",
                        next="write the keys out",
                    )
                if key in result:
                    raise RecipeError(
                        f"{self.name}:{line}: `{_dotted((*path, key))}` is given twice",
                        why=f"first at {self.places[(*path, key)]}",
                        next="remove one of them",
                    )
                self.places[(*path, key)] = f"{self.name}:{line}"
                result[key] = self._plain(value_node, (*path, key))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        text = self._interpolate(node.value, path)
        if text is not None:
            # An unquoted `${TENSOR}` means what the text would mean there: 2 is a number.
            return self._value(text, f"{place}: `{_dotted(path)}` from the environment") if node.style is None else text
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            reason = str(getattr(error, "problem", None) or error)
            raise RecipeError(f"{place}: `{_dotted(path)}` is not a valid value", why=reason, next=ADVICE) from error

    @staticmethod
    def _value(text: str, what: str) -> Any:
        """What YAML text means as a value."""
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = str(getattr(error, "problem", None) or error).splitlines()[0]
            raise RecipeError(
                f"{what}: the value is not valid YAML", why=reason, next='put text with special characters into "…"'
            ) from error

    def _interpolate(self, text: str, path: KeyPath) -> str | None:
        if "$" not in text:
            return None

        def value(match: re.Match[str]) -> str:
            if match.group(0) == "$$":
                return "$"
            if match.group(0) == "${":
                raise RecipeError(
                    f"{self.places[path]}: `{_dotted(path)}` has a `${{` that is no variable: {text}",
                    why="a variable is written ${NAME} or ${NAME:-default}",
                    next="mend it, or write $$ for a dollar sign",
                )
            name, default = match.group(1), match.group(2)
            if SECRETS.intersection(name.upper().split("_")):
                raise RecipeError(
                    f"{self.places[path]}: `{_dotted(path)}` takes {name} from the environment, which names a secret",
                    why="values of a recipe are written to the manifest, the lock file and the cache; lpx itself reads "
                    "HF_TOKEN (or the file HF_TOKEN_PATH) where the hub asks for it",
                    next=f"leave the key out; if it is no secret, give the variable another name than {name}",
                )
            found = os.environ.get(name, default)
            if found is None:
                raise RecipeError(
                    f"{self.places[path]}: environment variable {name} is not set (key `{_dotted(path)}`)",
                    why="the recipe takes this value from the environment and gives no default",
                    next=f"export {name}=…   or write ${{{name}:-default}}",
                )
            return found

        return VARIABLE.sub(value, text)

    def override(self, text: str) -> None:
        """Apply one `--set key.path=value`."""
        key, equals, value = text.partition("=")
        keys = key.strip().split(".")
        if not equals or not all(keys):
            raise RecipeError(f"--set {text}: not of the form key=value", next="for example --set parallel.tensor=2")
        parsed = self._value(value, f"--set {text}")
        place: Any = self.data
        for depth, part in enumerate(keys):
            step: KeyPath = tuple(keys[: depth + 1])
            last = depth == len(keys) - 1
            if isinstance(place, list):
                if not part.isdigit() or int(part) >= len(place):
                    raise RecipeError(
                        f"--set {text}: `{part}` is not a position in a list of {len(place)}",
                        next="count from 0",
                    )
                index: Any = int(part)
            elif isinstance(place, dict):
                index = part
            else:
                raise RecipeError(
                    f"--set {text}: `{_dotted(step[:-1])}` has no keys below it",
                    next=f"give the value itself: --set {_dotted(step[:-1])}=…",
                )
            if last:
                place[index] = parsed
                self.places[step] = f"--set {text}"
            else:
                if isinstance(place, dict) and place.get(index) is None:
                    if keys[depth + 1].isdigit():
                        raise RecipeError(
                            f"--set {text}: the recipe has no list `{_dotted(step)}`",
                            next=f"give the whole list: --set '{_dotted(step)}=[...]'",
                        )
                    place[index] = {}
                self.places[step] = f"--set {text}"
                place = place[index]

    def explain(self, error: ValidationError) -> RecipeError:
        """All problems in one message, each with its place."""
        problems = [self._problem(detail) for detail in error.errors(include_url=False)]
        if len(problems) == 1:
            what, why, advice = problems[0]
            return RecipeError(what, why=why, next=advice)
        lines = ["; ".join(part for part in problem if part) for problem in problems]
        return RecipeError(
            "\n".join(lines), why=f"{len(problems)} problems in the recipe", next="mend them all, then run again"
        )

    def _problem(self, detail: Any) -> tuple[str, str, str]:
        location: KeyPath = tuple(detail["loc"])
        place = self._place(location)
        key = _dotted(location)
        kind, given = detail["type"], detail.get("input")
        if kind == "extra_forbidden":
            valid = _keys_at(location[:-1])
            name = str(location[-1])
            if name in FORMER_KEYS:
                return f"{place}: unknown key `{key}`", FORMER_KEYS[name], "lpx recipes   shows working recipes"
            nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
            elsewhere = [] if nearest else [path for path in _all_keys() if path.split(".")[-1] == name]
            if nearest:
                advice = f"did you mean `{_dotted((*location[:-1], nearest[0]))}`?"
            elif elsewhere:
                advice = f"did you mean `{elsewhere[0]}`?"
            else:
                advice = f"valid keys here: {', '.join(valid)} (a newer lpx may know more)"
            return f"{place}: unknown key `{key}`", "", advice
        if kind == "missing":
            return f"{place}: key `{key}` is missing", "it has no default", "see docs/recipe-reference.md"
        if kind == "value_error":
            message = str(detail["ctx"]["error"])
            head, _, tail = message.partition("; ")
            return f"{place}: {head}", tail, "edit the recipe, or override with --set key=value"
        if given is None:
            return (
                f"{place}: `{key}` is empty",
                "it needs a value, or leave the key out",
                "see docs/recipe-reference.md",
            )
        if kind in ("model_type", "model_attributes_type"):
            below = ", ".join(_keys_at(location))
            return f"{place}: `{key}` is {_shown(given)}", f"it has keys below it: {below}", _example(location)
        message = str(detail["msg"])
        advice = "see docs/recipe-reference.md"
        if kind == "literal_error":
            # "64 or 128", "'none', 'int8' or 'fp8'"
            valid = [text or number for text, number in re.findall(r"'([^']*)'|(\d+)", str(detail["ctx"]["expected"]))]
            nearest = difflib.get_close_matches(str(given), valid, n=1, cutoff=0.5)
            message = f"valid values: {', '.join(valid)}"
            advice = f"did you mean `{nearest[0]}`?" if nearest else f"set `{key}` to one of them"
        return f"{place}: `{key}` is {_shown(given)}", message[0].lower() + message[1:], advice

    def _place(self, location: KeyPath) -> str:
        while location and location not in self.places:
            location = location[:-1]
        return self.places.get(location, self.name)


def _example(location: KeyPath) -> str:
    below = [name for name in _keys_at(location) if name]
    return f"write `{location[-1]}: {{{below[0]}: …}}`" if below else "see docs/recipe-reference.md"


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model behind an annotation such as `Model`, `list[Prompt] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section(inner)
        if found is not None:
            return found
    return None


def _keys_at(path: KeyPath) -> list[str]:
    model: type[BaseModel] | None = Recipe
    for part in path:
        if isinstance(part, int) or model is None:
            continue
        field = model.model_fields.get(part)
        model = _section(field.annotation) if field is not None else None
    return list(model.model_fields) if model is not None else []


def _all_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        inner = _section(field.annotation)
        if inner is not None:
            found += _all_keys(inner, f"{prefix}{name}.")
    return found


def _neighbours(path: Path) -> str:
    """Files with a similar name beside the missing one."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return f"there is no folder {path.parent}"
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"similar files there: {', '.join(near)}" if near else "no file with a similar name is there"
