"""What is generated from the schema: the JSON Schema and the table of keys in the docs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lpxbuild.recipe.schema import Recipe

SCHEMA_NAME = "recipe.schema.json"


def json_schema() -> str:
    """The JSON Schema of a recipe, as committed in `recipes/recipe.schema.json`."""
    schema = Recipe.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "lpx recipe", **schema}
    schema["title"] = "lpx recipe"
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def markdown() -> str:
    """The reference of all keys, as committed in `docs/recipe-reference.md`."""
    lines = [
        "# Recipe reference",
        "",
        "Generated from the schema (`make docs`). A recipe is strict: an unknown key, a quoted number or a wrong value",
        "is an error that names file, line and the nearest valid key. `${NAME}` and `${NAME:-default}` take values",
        "from the environment, `--set key.path=value` overrides; both obey the same schema. `$$` is a dollar sign.",
        "A recipe takes no secrets: variables named like one (`…_TOKEN`, `…_KEY`, `…_PASSWORD`, …) are refused.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    lines += _rows(Recipe, "")
    return "\n".join(lines) + "\n"


def _rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows: list[str] = []
    for name, field in model.model_fields.items():
        inner = _inner_model(field.annotation)
        listed = "[]" if inner is not None and get_origin(_plain(field.annotation)) is list else ""
        key = f"{prefix}{name}{listed}"
        if inner is not None:
            rows += _rows(inner, f"{key}.")
        else:
            rows.append(f"| `{key}` | {_type(field)} | {_default(field)} | {field.description or ''} |")
    return rows


def _plain(annotation: Any) -> Any:
    """`X` of `X | None`."""
    if get_origin(annotation) in (Union, type(int | None)):
        return next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    annotation = _plain(annotation)
    if get_origin(annotation) is list:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _type(field: FieldInfo) -> str:
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """A type for people: `whole number ≥ 1`, `list of text`."""
    annotation = _plain(annotation)
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        return _words(annotation.__origin__, annotation.__metadata__[0].metadata)
    if get_origin(annotation) is list:
        return f"list of {_words(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        key, value = get_args(annotation)
        return f"{_words(key)} → {_words(value)}"
    text = {int: "whole number", float: "number", bool: "true or false", str: "text"}[annotation]
    for bound in bounds:
        if isinstance(bound, Ge):
            text += f" ≥ {bound.ge}"
        elif isinstance(bound, Gt):
            text += f" > {bound.gt}"
        elif isinstance(bound, Le) and bound.le != 2**31 - 1:  # what Triton's INT32 holds needs no words
            text += f", ≤ {bound.le}"
    return text


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    return f"`{json.dumps(field.default)}`" if not isinstance(field.default, str) else f"`{field.default}`"
