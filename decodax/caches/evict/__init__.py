"""Caches that keep some of the tokens."""
