"""C++ kernels for CPUs, built on first use."""
