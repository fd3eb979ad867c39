"""Kernels of GPUs: what they move and compute by shape, and how long that takes as measured."""
