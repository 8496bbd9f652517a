"""One drafter asked by itself."""

import jax.numpy as jnp

from decodax.algorithms.speculative.source import Level


def drafted_logits(source, params, s, following):
    """Logits after the newest token and after each of the tokens `following` (`i32[B, K]`), which are drafted; and the
    predicted acceptance there, or None."""
    K = following.shape[1]
    state, answer = source.start(params, s, s.algo[0], K)
    found = [answer]
    for i in range(K):
        level = Level(tokens=following[:, i:i + 1], positions=s.length[:, None] + i,
                      parents=jnp.full((s.batch, 1), i, jnp.int32), at=jnp.int32(i),
                      sees=jnp.broadcast_to(jnp.arange(K) < i, (s.batch, 1, K)))
        state, answer = source.extend(params, s, state, level)
        found.append(answer)
    join = lambda x: None if x[0] is None else jnp.concatenate(x, 1)
    return join([x.logits for x in found]), join([x.chance for x in found])
