"""Rules that several samplers share: windows, scores, unmasking, stops, and judges by a second model. The rules of
single papers are in `decodax.algorithms.diffusion.samplers`."""
