"""Caches that have one size whatever the length of the text."""
