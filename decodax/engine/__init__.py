"""From a request to results: reading prompts, running batches, and places that are filled as they become free."""
