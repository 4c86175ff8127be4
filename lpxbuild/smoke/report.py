"""What a smoke test found: one `Check` each, as a table, as JSON, as JUnit XML."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal
from xml.etree import ElementTree

Status = Literal["pass", "fail", "skip", "note"]


@dataclass(frozen=True)
class Check:
    """Outcome of one check.

    Attributes:
        status: "note" is something that is neither passed nor failed and that the user should know; "skip" was not
            possible here, `detail` says why.
        seconds: time it took.
    """

    name: str
    status: Status
    detail: str
    seconds: float


@dataclass(frozen=True)
class SmokeReport:
    """Outcome of a smoke test."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """No check failed, and at least one passed."""
        return not self.failed and any(check.status == "pass" for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "fail")

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and for the manifest."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Rows of the table for people: check, status, seconds, detail."""
        return [(check.name, check.status, f"{check.seconds:.2f}", check.detail) for check in self.checks]

    def summary(self) -> str:
        """ "14 passed, 1 failed, 2 skipped, 1 note"."""
        counts = {status: sum(check.status == status for check in self.checks) for status in ("pass", "fail", "skip")}
        notes = len(self.checks) - sum(counts.values())
        text = f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped"
        return text + (f", {notes} note{'s' if notes > 1 else ''}" if notes else "")

    def junit(self) -> str:
        """JUnit XML; a note becomes a skipped test with its text: JUnit knows no third way of not having passed."""
        suite = ElementTree.Element(
            "testsuite",
            name="lpx smoke",
            tests=str(len(self.checks)),
            failures=str(len(self.failed)),
            errors="0",
            skipped=str(sum(check.status in ("skip", "note") for check in self.checks)),
            time=f"{sum(check.seconds for check in self.checks):.3f}",
        )
        for check in self.checks:
            case = ElementTree.SubElement(
                suite, "testcase", classname="lpx.smoke", name=check.name, time=f"{check.seconds:.3f}"
            )
            # XML 1.0 has no way to write most control characters.
            detail = "".join(
                letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in check.detail
            )
            if check.status == "fail":
                ElementTree.SubElement(case, "failure", message=detail)
            elif check.status in ("skip", "note"):
                ElementTree.SubElement(case, "skipped", message=detail)
            else:
                ElementTree.SubElement(case, "system-out").text = detail
        root = ElementTree.Element("testsuites")
        root.append(suite)
        ElementTree.indent(root)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
