"""Kernels, one package an operation: api (what others import) and reference (the definition)."""
