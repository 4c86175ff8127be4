"""`python -m lpxbuild` and the `lpx` script."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from lpxbuild.cli import app

    app()


if __name__ == "__main__":
    main()
