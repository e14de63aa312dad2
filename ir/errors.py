"""The errors a user can meet, each with its place, its remedy and its exit code.

Every message answers four questions, one line (or block) each: what is wrong; the text it is
about (an op, a TOML line) ; where that came from; what to do. Anything else that escapes is a
fault of ours and exits with 1.
"""

from typing import ClassVar


class MetainferError(Exception):
    """Base of all errors that are about the user's input or machine.

    Args:
        what: one line saying what is wrong.
        text: the offending text, already laid out (op, TOML line, caret), or "".
        origin: where it came from ("models/llama.py:88", "hardware/x.toml:12"), or "".
        advice: what to do about it, or "".
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, text: str = "", origin: str = "", advice: str = "") -> None:
        self.what = what
        self.text = text
        self.origin = origin
        self.advice = advice
        super().__init__(self.render())

    def render(self) -> str:
        """Lay the four parts out, absent ones left away."""
        lines = [self.what]
        if self.text:
            lines += [f"  {line}" for line in self.text.splitlines()]
        if self.origin:
            lines.append(f"  from {self.origin}")
        if self.advice:
            lines.append(f"  {self.advice}")
        return "\n".join(lines)


class ParseError(MetainferError):
    """Text that is not of the language; carries the 1-based line and column."""

    def __init__(
        self,
        what: str,
        *,
        line: int,
        column: int,
        text: str = "",
        origin: str = "",
        advice: str = "",
    ) -> None:
        self.line = line
        self.column = column
        place = f"line {line}, column {column}"
        super().__init__(
            what, text=text, origin=f"{origin}: {place}" if origin else place, advice=advice
        )


class TypeMismatch(MetainferError):
    """Operands, results or attributes that do not fit an op; a graph that fails the verifier."""


class Unsupported(MetainferError):
    """A model construct or an op that the compiler does not know."""


class HardwareError(MetainferError):
    """A machine description that is malformed or contradicts itself."""


class CheckpointError(MetainferError):
    """A weight file that is damaged, or whose tensors are not those of the model."""


class HistogramError(MetainferError):
    """A routing histogram that is damaged, or of another model."""


class TuningError(MetainferError):
    """A file of measured times that is damaged, or a machine on which none can be made."""


class CompileFailure(MetainferError):
    """A kernel that the compiler of this machine refuses; another one may stand in for it."""


class PlanError(MetainferError):
    """A plan that is damaged, of another version, or made for another machine."""


class CapacityError(MetainferError):
    """Something that does not fit: memory of a device, or capacity of the plan."""

    exit_code = 3


class StrictError(MetainferError):
    """A fallback that `--strict` turned into an error."""

    exit_code = 3


class RankError(MetainferError):
    """A rank that failed, or that others wait for in vain.

    Attributes:
        is_echo: whether another rank failed first, and this one only noticed.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, text: str = "", origin: str = "", advice: str = "",
        is_echo: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(what, text=text, origin=origin, advice=advice)
        self.is_echo = is_echo
