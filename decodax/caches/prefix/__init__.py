"""Caches that reuse keys and values of texts that were prefilled before."""
