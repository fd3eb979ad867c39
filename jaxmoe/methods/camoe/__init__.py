"""camoe: a gate whose choices are biased by what paths cost."""
