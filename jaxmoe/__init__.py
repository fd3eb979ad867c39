"""A differentiable, vectorised performance model of Mixture-of-Experts inference on meshes of chips."""

import lazy_loader

__version__ = "0.1.0"
# What is named in `__init__.pyi` is imported when it is first used: the command line answers before JAX is loaded.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
