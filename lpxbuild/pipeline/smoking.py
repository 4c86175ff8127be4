"""What `lpx smoke` calls: evidence from a running server, or from a build that is served for it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, UsageError, VerdictError
from lpxbuild.output import Output
from lpxbuild.pipeline import evidence, serving
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.manifest import Manifest
from lpxbuild.pipeline.placing import write_atomically


def smoke(
    target: str,
    *,
    grpc: str | None,
    build: Path | None,
    junit: Path | None,
    cache_dir: Path | None = None,
    output: Output,
) -> None:
    """Smoke-test a build folder (on a server of its own) or the server at an address.

    Args:
        target: build folder or model repository, or `host:port` / `http://host:port` of Triton's HTTP endpoint.
        grpc: `host:port` of gRPC for an address; default: the HTTP port + 1.
        build: what the server at that address serves, for its prompts and its metadata.
        junit: file for JUnit XML.
        cache_dir: for what an own server needs; default as of `lpx build`.

    Raises:
        VerdictError: a check failed.
        UsageError: a wrong address or path.
        HostError: `junit` cannot be written.
    """
    from lpxbuild import server
    from lpxbuild.smoke import Endpoints, run

    if junit is not None and junit.exists() and not junit.is_file():
        raise UsageError(f"--junit {junit} is not a file", next="give the name of a file")
    log: Path | None = None
    if Path(target).exists():
        if build is not None or grpc is not None:
            raise UsageError(
                "--build and --grpc belong to the address of a server", next=f"lpx smoke {shlex.quote(target)}"
            )
        served = serving.find(Path(target), cache_dir)
        settings = server.ServerSettings(**serving.of_the_recipe(served.manifest))
        log = served.state / "smoke-server.log"
        with server.start(
            served.repository, log_path=log, settings=settings, cache=cache_dir, output=output
        ) as running:
            endpoints = Endpoints(running.http_url, running.grpc_url, running.runtime.folder)
            report = run(endpoints, repository=served.repository, prompts=_prompts(served.manifest), output=output)
        if not report.ok and served.manifest is not None and not served.changed:
            evidence.note_failure(Path(target), served.manifest, report, Cache(cache_dir), output=output)
    else:
        endpoints = _endpoints(target, grpc)
        known = serving.find(build) if build is not None else None
        report = run(
            endpoints,
            repository=known.repository if known else None,
            prompts=_prompts(known.manifest if known else None),
            output=output,
        )
    table = output.table(("check", "status", "seconds", "detail"), report.rows())
    output.result(report.as_dict(), f"{table}\n{report.summary()}")
    if junit is not None:
        try:
            junit.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(junit, report.junit())
        except OSError as error:
            raise HostError(f"--junit {junit} cannot be written: {error.strerror}", next="give another file") from error
    if not report.ok:
        names = ", ".join(check.name for check in report.failed) or "nothing passed"
        raise VerdictError(
            f"the smoke test of {target} failed: {names}",
            why="; ".join(check.detail for check in report.failed),
            next=f"less {log}" if log is not None else "read the log that the server's start named",
        )


def _endpoints(target: str, grpc: str | None) -> Any:
    from lpxbuild.smoke import Endpoints

    http = target.removeprefix("http://").rstrip("/")
    host, _, port = http.rpartition(":")
    if target.startswith("https://") or not host or not _is_port(port):
        raise UsageError(
            f"{target} is neither a folder nor the address of a server",
            why="an address is HOST:PORT of Triton's HTTP endpoint, without TLS",
            next="for example: lpx smoke 127.0.0.1:8000",
        )
    if grpc is None:
        if not _is_port(str(int(port) + 1)):
            raise UsageError(f"{target}: there is no port {int(port) + 1} for gRPC", next="give --grpc HOST:PORT")
        grpc = f"{host}:{int(port) + 1}"
    grpc_host, _, grpc_port = grpc.rpartition(":")
    if not grpc_host or "/" in grpc or not _is_port(grpc_port):
        raise UsageError(f"--grpc {grpc} is not an address", next=f"for example: --grpc {host}:8001")
    return Endpoints(http, grpc)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 65535


def _prompts(manifest: Manifest | None) -> list[dict[str, Any]]:
    if manifest is None:
        from lpxbuild.recipe.schema import Smoke

        return [prompt.model_dump(mode="json") for prompt in Smoke().prompts]
    prompts: list[dict[str, Any]] = manifest.data["recipe"]["smoke"]["prompts"]
    return prompts
