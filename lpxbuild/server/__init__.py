"""Launch, supervise, drain and stop the embedded tritonserver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpxbuild.server.launch import ServerSettings, dry_run, start
    from lpxbuild.server.running import RunningServer
    from lpxbuild.server.serving import detach, read_status, serve, stop
    from lpxbuild.server.supervisor import SupervisorSettings

_PLACES = {
    "RunningServer": "running",
    "ServerSettings": "launch",
    "SupervisorSettings": "supervisor",
    "detach": "serving",
    "dry_run": "launch",
    "read_status": "serving",
    "serve": "serving",
    "start": "launch",
    "stop": "serving",
}
__all__ = [
    "RunningServer",
    "ServerSettings",
    "SupervisorSettings",
    "detach",
    "dry_run",
    "read_status",
    "serve",
    "start",
    "stop",
]


def __getattr__(name: str) -> Any:
    # On demand: the guard process imports this package and needs none of them.
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"lpxbuild.server.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
