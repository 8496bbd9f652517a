"""The calls that users make: generate, stream, infill, watch, score, serve."""
