"""Drafts that are the target's own guesses at several positions at once."""
