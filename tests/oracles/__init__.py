"""The model once more, in plain NumPy loops: slow, short, and written from the definitions, not from the code."""
