"""Caches that store keys and values in fewer bits."""
