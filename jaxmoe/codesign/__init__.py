"""Numbers of a machine by gradient descent under constraints, alone or together with the placement."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
