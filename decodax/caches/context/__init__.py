"""Caches that divide the positions of a text over devices."""
