"""Several steps or several blocks in one forward: verified branches, pipelines, adaptive parallel decoding."""
