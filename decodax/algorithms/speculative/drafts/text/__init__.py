"""Drafts read off the text, or out of tables of earlier texts."""
