"""Benchmarks: one module for each subcommand of `scripts/benchmark.py`."""
