"""Drafts from the text so far, or from tables of earlier texts."""
