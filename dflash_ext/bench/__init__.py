"""Benchmarks: `python -m dflash_ext.bench attention`. Speeds are ratios inside one run."""
