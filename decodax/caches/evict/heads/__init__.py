"""Eviction rules in which heads and layers have different budgets."""
