"""Caches that keep everything and read a part while decoding."""
