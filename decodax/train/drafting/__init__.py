"""Training of drafters: heads, block heads, prompt tokens and the losses they share."""
