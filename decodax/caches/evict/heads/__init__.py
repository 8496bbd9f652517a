"""Eviction rules that give heads and layers budgets of their own."""
