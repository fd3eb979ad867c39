"""Methods: what decides at run time, static plans and the papers' own, and their systems by name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
