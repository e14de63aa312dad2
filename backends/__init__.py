"""Kernels: records with their constraints, repairs, costs, and the code they bind to."""
