"""Collectives as rounds of traffic, multicast along trees, and how long they take."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
