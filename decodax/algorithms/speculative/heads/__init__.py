"""Trained drafters: heads that read the target's hidden states. One file for each paper; their networks are in
`decodax.models.drafters`."""
