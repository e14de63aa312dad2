"""Tuning: kernels timed on the machine at hand, kept in a text file, and used by the cost model."""
