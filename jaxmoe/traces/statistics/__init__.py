"""Statistics of traces: expert loads, pairs of experts over tokens and layers, reuse, and comparisons of traces."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
