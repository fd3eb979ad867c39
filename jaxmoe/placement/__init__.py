"""Where the experts live: shares, strategies that make them, rounding to legal plans, and plan files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
