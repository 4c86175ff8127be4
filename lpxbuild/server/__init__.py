"""Launch, supervise, drain and stop the embedded tritonserver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpxbuild.server.launch import ServerSettings, dry_run, start
    from lpxbuild.server.running import RunningServer
    from lpxbuild.server.supervisor import SupervisorSettings

_PLACES = {
    "RunningServer": "running",
    "ServerSettings": "launch",
    "SupervisorSettings": "supervisor",
    "dry_run": "launch",
    "start": "launch",
}
__all__ = ["RunningServer", "ServerSettings", "SupervisorSettings", "dry_run", "start"]


def __getattr__(name: str) -> Any:
    # On demand: the guard process imports this package and needs none of them.
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"lpxbuild.server.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
