"""`lpx cache`: the artifacts kept between builds."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from lpxbuild.cli.options import CacheFolder, Json, Quiet
from lpxbuild.cli.running import running

app = typer.Typer(help="List, verify and prune the cache of artifacts.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def ls(cache_dir: CacheFolder = None, json: Json = False, quiet: Quiet = False) -> None:
    """List artifacts with stage, size and last use."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.command import cache_ls as run

        run(cache_dir, output=output)


@app.command("verify")
def verify(cache_dir: CacheFolder = None, json: Json = False, quiet: Quiet = False) -> None:
    """Hash every artifact in full; a damaged one exits 1."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.command import cache_verify as run

        run(cache_dir, output=output)


@app.command("prune")
def prune(
    max_age_days: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--older-than", metavar="DAYS", help="Remove artifacts not used for so many days."),
    ] = None,
    max_gib: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--max-size", metavar="GIB", help="Remove the least recently used until the cache fits."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every artifact.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
    cache_dir: CacheFolder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove artifacts by age or size."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.command import cache_prune as run

        run(
            cache_dir, max_age_days=max_age_days, max_gib=max_gib, everything=everything, dry_run=dry_run, output=output
        )
