"""Which device is in which tensor-parallel group, tuned for all-reduce, dispatch and combine together."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
