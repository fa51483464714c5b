"""Pictures of diagrams, drawn by a program that is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from holdfast.errors import ConfigurationError

_SECONDS = 120


def rendered_svg(mermaid: str) -> str:
    """Return the diagram *mermaid* as SVG, drawn by the `mmdc` of mermaid-cli."""
    program = shutil.which("mmdc")
    if program is None:
        raise ConfigurationError(
            "--svg needs mmdc, which is not installed: run  npm install -g "
            "@mermaid-js/mermaid-cli , or leave out --svg and paste the text where Mermaid is shown"
        )
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "diagram.mmd"), Path(folder, "diagram.svg")
        source.write_text(mermaid)
        command = [program, "--quiet", "--input", str(source), "--output", str(target)]
        try:
            done = subprocess.run(  # noqa: S603 - a program of the user's own, without a shell
                command, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(f"mmdc has drawn nothing in {_SECONDS} s") from error
        if done.returncode != 0 or not target.exists():
            said = (done.stderr or done.stdout).strip()[-500:]
            raise ConfigurationError(
                f"mmdc could not draw the diagram: {said or 'it says nothing'}"
            )
        return target.read_text()
