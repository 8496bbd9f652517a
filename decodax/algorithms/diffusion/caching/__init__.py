"""Cache rules: what a forward recomputes and what it reads from the cache. Papers that are about nothing else have
their files and registry entries here; `blocks` has the rules that many samplers share."""
