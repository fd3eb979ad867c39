"""hd_moe: experts that are expected to be hot are broadcast before a layer."""
