"""Records of the Triton kernels: what each implements, requires and costs."""

from metainfer.backends.kernel import Registry
from metainfer.backends.layout import LayoutRegistry


def register(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add the Triton kernels and layouts."""
