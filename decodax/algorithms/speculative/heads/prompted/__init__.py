"""Drafts by which the target itself predicts several tokens at once, at nodes after its newest token or after each
draft: trained embeddings, mask tokens, or mapped hidden states. One file for each paper."""

from decodax.algorithms.speculative.heads.prompted import (  # noqa: F401
    hidden_transfer,
    pass_,
    ppd,
    s3d,
    space,
)
