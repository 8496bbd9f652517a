"""Cache rules, which determine the positions that a forward pass recomputes. Papers that are only about caching have
their files and registry entries here; `blocks` has the rules that many samplers share."""
