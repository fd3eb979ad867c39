"""From tokens to traffic, from traffic to link loads, from link loads to communication time."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
