"""Recipes of the shipped models: options, data, objective and card of each; `scripts/train.py` runs them."""
