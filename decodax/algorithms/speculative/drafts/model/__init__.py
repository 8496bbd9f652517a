"""Drafts from a second model."""
