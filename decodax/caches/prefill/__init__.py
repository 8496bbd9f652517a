"""Caches that change how a prompt is prefilled."""
