"""metainfer: compiles a PyTorch model for the machine you describe, and runs the plan.

The verbs of the command line as calls: ``metainfer.compile(...)``, ``metainfer.load(...)``.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metainfer.compiler.api import compile
    from metainfer.runtime.load import load

__all__ = ["__version__", "compile", "load"]


def __getattr__(name: str) -> Any:
    # NOTE: torch takes seconds to import; `metainfer --help` must not pay for it.
    if name == "compile":
        from metainfer.compiler.api import compile

        return compile
    if name == "load":
        from metainfer.runtime.load import load

        return load
    raise AttributeError(f"module 'metainfer' has no attribute {name!r}")
