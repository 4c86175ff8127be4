"""Every failure that a user can meet names the next step; seen in the code, so that no path has to be reached."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import lpxbuild
from lpxbuild import errors
from lpxbuild.pipeline.stages import EvidenceFailed

CLASSES = {
    name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.LpxError)
}
CLASSES.add(EvidenceFailed.__name__)


def constructions() -> list[tuple[str, ast.Call]]:
    """Where the package makes an LpxError, with the call."""
    folder = Path(lpxbuild.__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name in CLASSES:
                    found.append((f"{path.relative_to(folder.parent)}:{node.lineno}", node))
    return found


def test_every_error_names_the_next_step() -> None:
    found = constructions()
    assert len(found) > 150  # the search sees them
    without = []
    for place, call in found:
        values = [keyword.value for keyword in call.keywords if keyword.arg == "next"]
        if not values or (isinstance(values[0], ast.Constant) and not values[0].value):
            without.append(place)
    assert without == []


def test_no_next_step_only_points_elsewhere_on_the_screen() -> None:
    """`next` is something to do: a command or an edit, not "see above"."""
    vague = []
    for place, call in constructions():
        for keyword in call.keywords:
            if keyword.arg == "next":
                text = ast.unparse(keyword.value)
                if "above" in text or text.strip("'\"") in ("correct it", "mend it"):
                    vague.append(f"{place}: {text}")
    assert vague == []
