"""Multi-head latent attention: one compressed latent for each token in place of keys and values for each head."""
