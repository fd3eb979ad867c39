"""Generators of gating traces: fitted to a recorded trace, or set up from published figures of a model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
