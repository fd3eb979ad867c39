"""Measured tables of GPU kernels: read, fitted, told how well, and predicted."""
