"""The formats of traces and load counts, a module each; `jaxmoe.registry` names them."""
