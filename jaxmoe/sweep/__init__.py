"""Design spaces: studies of many points, evaluated in batches and kept in resumable tables, and what they tell."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
