"""Rules of a step that several samplers share: windows, scores, unmasking, stops, and the judges of a second model. The
rules of single papers are in `decodax.algorithms.diffusion.samplers`."""
