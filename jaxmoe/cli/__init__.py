"""The command `jaxmoe`: every verb is one module, named after it, with a function `command`."""
