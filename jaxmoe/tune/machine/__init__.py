"""Numbers of a machine as parameters: which leaves of the layer model each changes, and their descent."""
