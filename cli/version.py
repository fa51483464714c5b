"""`holdfast version`."""

from importlib.metadata import version as installed_version

import typer

EXAMPLE = "Example: holdfast version"


def version() -> None:
    """Print the version."""
    typer.echo(installed_version("holdfast"))
