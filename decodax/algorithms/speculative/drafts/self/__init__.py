"""Drafts of the target itself with a part of its layers."""
