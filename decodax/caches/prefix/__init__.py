"""Caches that reuse keys and values of texts that were read before."""
