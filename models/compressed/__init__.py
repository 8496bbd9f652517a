"""Attention to the nearest tokens and to pooled keys of the whole text: DeepSeek V4."""
