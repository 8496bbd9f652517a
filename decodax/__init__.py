"""decodax: decoding for JAX."""
