"""The one place where golden tests touch pricing and methods: small adapters from arrays to figures.

Decisions and figures are plain arrays by name. When code moves, adapt this folder alone; the golden files stay.
"""
