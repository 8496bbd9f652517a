"""Caches that store all tokens, and attend to a part of them while decoding."""
