"""The functions that users call: generate, stream, infill, watch, score, serve."""
