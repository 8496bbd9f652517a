"""Trained drafters: their networks and files, and drafting with them."""
