"""Drafts of a second model."""
