"""Kernels, one package an operation: api (what others import), reference (the definition), specs."""
