"""Configuration files: YAML read, validated as descriptions, and built into machines and layer models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
