"""Searches by name; other decoding methods are registered in the files of their papers."""
