"""Records of the Triton kernels: what each implements, requires and costs."""

from metainfer.backends.kernel import Registry
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.triton.records_attention import register_attention
from metainfer.backends.triton.records_experts import register_experts
from metainfer.backends.triton.records_latent import register_latent_attention
from metainfer.backends.triton.records_linear import register_linear
from metainfer.backends.triton.records_pointwise import register_pointwise
from metainfer.backends.triton.records_routing import register_routing
from metainfer.backends.triton.router import register_router


def register(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add the Triton kernels and layouts."""
    register_pointwise(kernels)
    register_linear(kernels, layouts)
    register_attention(kernels, layouts)
    register_latent_attention(kernels, layouts)
    register_router(kernels, layouts)
    register_experts(kernels, layouts)
    register_routing(kernels)
