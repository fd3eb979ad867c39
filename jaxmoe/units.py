"""Decimal SI factors. Everything inside jaxmoe is in B, s, FLOP and their ratios; these convert at the edge."""

GIGA = 1e9
TERA = 1e12
MICRO = 1e-6
NANO = 1e-9
PICO = 1e-12
