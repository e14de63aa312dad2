"""Kernels in which ranks meet: algorithms of collectives over torch.distributed."""
