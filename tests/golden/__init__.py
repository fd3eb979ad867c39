"""Frozen decisions and the figures that they led to: the net under changes of how layers are priced. See README.md."""
