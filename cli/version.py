"""`holdfast version`."""

from importlib.metadata import version as _version

from holdfast.cli.display import answer
from holdfast.cli.options import Config, Json

EXAMPLE = "Example: holdfast version"


def version(*, config: Config = None, as_json: Json = False) -> None:
    """Print the version."""
    answer(installed(), {"version": installed()}, as_json=as_json)


def installed() -> str:
    """Return the version that is installed."""
    return _version("holdfast")
