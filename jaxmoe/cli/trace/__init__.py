"""The commands on traces and load counts: `jaxmoe trace ...`."""
