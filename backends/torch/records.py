"""What this backend offers: plain compositions for every op, and library kernels."""

from metainfer.backends.kernel import Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch import records_common
from metainfer.backends.torch.layouts import register_layouts
from metainfer.backends.torch.records_cpu import register_cpu
from metainfer.backends.torch.records_cuda import register_cuda
from metainfer.backends.torch.records_plain import register_plain


def register(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Register all kernels and layouts: library kernels first, plain compositions last."""
    register_layouts(layouts)
    records_common.register_common(kernels, records_common.CPU)
    records_common.register_common(kernels, records_common.GPU)
    register_cpu(kernels)
    register_cuda(kernels)
    register_plain(kernels)
