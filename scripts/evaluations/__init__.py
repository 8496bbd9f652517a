"""Evaluations: one module for each subcommand of `scripts/evaluate.py`."""
