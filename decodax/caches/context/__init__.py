"""Caches whose positions are divided over devices."""
