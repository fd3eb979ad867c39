"""Prediction of the experts that tokens will choose, from history alone.

`fit(trace)` gives every predictor by name; `scores(predictor, history(trace, ...))` those of a whole trace.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
