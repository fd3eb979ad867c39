"""Sweeps of design spaces: many points evaluated in batches, resumable tables of results, and their analysis."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
