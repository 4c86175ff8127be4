"""The embedded engine: an OpenVINO graph made of the rank files, run by OpenVINO GenAI with paged attention."""

from __future__ import annotations

import sys
from typing import Any

# Importing openvino reports the import to Intel and writes into the home folder, unless openvino_telemetry cannot be
# imported: then OpenVINO uses a stub of its own.
_modules: dict[str, Any] = sys.modules
_modules.setdefault("openvino_telemetry", None)
