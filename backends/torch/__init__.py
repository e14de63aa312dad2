"""Library and plain PyTorch kernels."""
