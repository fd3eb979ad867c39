"""Optimisers over placements: a problem in; a legal plan, its exact cost, history and bound out."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
