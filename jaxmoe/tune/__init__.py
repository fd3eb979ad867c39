"""Optimisers over placements: a problem in; a legal plan, its exact cost, history and bound out."""

import sys
from types import ModuleType
from typing import Any

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _Package(ModuleType):
    """`from jaxmoe import tune` gives this package; calling it runs its function of the same name."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.tune(*args, **settings)


sys.modules[__name__].__class__ = _Package
