"""Caches that evict tokens: one file a paper, and the parts that they share."""
