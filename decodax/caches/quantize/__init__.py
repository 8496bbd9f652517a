"""Caches that write keys and values in fewer bits."""
