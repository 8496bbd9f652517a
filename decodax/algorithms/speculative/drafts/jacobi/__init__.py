"""Drafts by Jacobi iteration: the target's own guesses at several positions at once."""
