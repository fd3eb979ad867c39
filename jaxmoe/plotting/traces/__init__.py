"""Pictures of gating traces: relations between choices, loads, predictions, and made-up traces beside real ones."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
