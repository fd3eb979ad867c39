"""A machine found by descent under constraints, from a scenario and a space file: alone, or with its placement."""
