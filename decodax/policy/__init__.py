"""One distribution: the chain of logit transforms that sampler and verifiers share."""
