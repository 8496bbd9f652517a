"""Eviction rules that use token ids: an image token, the end of an example, or a mark."""
