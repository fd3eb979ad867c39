"""A run: inputs, strategies, evaluation, replay, comparison, summary. The commands and the studies are built on it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
