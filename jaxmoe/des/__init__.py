"""Discrete-event simulation: replays what the analytic model predicts, and shares no formula with it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
