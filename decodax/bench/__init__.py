"""Measurements: `compare` runs algorithms side by side on the prompts of `tasks`, and `report` reads compiled programs.

The library itself imports nothing from here.
"""
