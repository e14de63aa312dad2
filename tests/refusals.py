"""What a user sees of an error, held to the form of the design."""

from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from metainfer.cli.app import app


@dataclass(frozen=True)
class Refusal:
    """A verb that was refused.

    Attributes:
        text: standard error.
    """

    text: str

    @property
    def what(self) -> str:
        """The first line: what is wrong."""
        return self.text.splitlines()[0].removeprefix("error: ")

    @property
    def advice(self) -> str:
        """The last line: what to do."""
        return self.text.splitlines()[-1].strip()


def refuse(folder: Path, *arguments: object, code: int = 2) -> Refusal:
    """Run a verb that must be refused: its message is in form, the folder stays as it was."""
    before = _everything_in(folder)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert _everything_in(folder) == before
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: "), result.stderr
    assert len(lines) >= 2, f"only one line: {result.stderr}"
    assert all(not line or line.startswith("  ") for line in lines[1:]), result.stderr
    assert "Traceback" not in result.output
    return Refusal(result.stderr)


def _everything_in(folder: Path) -> dict[str, bytes]:
    """Files under a folder, hidden ones too."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}
