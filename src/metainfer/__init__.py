"""metainfer: compiles a PyTorch model for the machine you describe, and runs the plan.

The verbs of the command line as calls: ``metainfer.compile(...)``, ``metainfer.load(...)``.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metainfer.compiler.api import compile
    from metainfer.ir.options import Options
    from metainfer.ir.plan import Plan
    from metainfer.models.spec import ModelSpec
    from metainfer.runtime.load import LoadedModel, load
    from metainfer.runtime.sampling import SamplingParams

_PUBLIC = {
    "LoadedModel": "metainfer.runtime.load",
    "ModelSpec": "metainfer.models.spec",
    "Options": "metainfer.ir.options",
    "Plan": "metainfer.ir.plan",
    "SamplingParams": "metainfer.runtime.sampling",
    "compile": "metainfer.compiler.api",
    "load": "metainfer.runtime.load",
}
__all__ = [
    "LoadedModel",
    "ModelSpec",
    "Options",
    "Plan",
    "SamplingParams",
    "__version__",
    "compile",
    "load",
]


def __getattr__(name: str) -> Any:
    # NOTE: torch takes seconds to import; `metainfer --help` must not pay for it.
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'metainfer' has no attribute {name!r}")
