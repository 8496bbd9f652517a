"""Cache rules: what a forward recomputes and what it reads from the cache."""
