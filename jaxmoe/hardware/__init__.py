"""Descriptions of machines: dies, networks of links, memory levels, and the machine that joins them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
