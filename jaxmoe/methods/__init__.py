"""Methods that make decisions at run time, from static plans to those of papers, and their systems by name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
