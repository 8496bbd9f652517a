"""Eviction rules that know what a token is: an image token, the end of an example, or a mark."""
