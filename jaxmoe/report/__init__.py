"""Figures drawn from plain arrays, each written as one PNG. Nothing here computes a model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
