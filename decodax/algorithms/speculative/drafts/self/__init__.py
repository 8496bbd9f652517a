"""Drafts from the target itself, with a part of its layers or a smaller cache."""
