"""A page of figures and tables that one can hover, filter and sort: one HTML file that needs nothing else.

Nothing here computes a model: figures are built from summaries, tables and arrays. Needs the extra `report` (Plotly).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
