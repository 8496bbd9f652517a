"""Decoding with two halves of a batch in one loop, so that the collectives of one half overlap with the matrix products
of the other.

Source: "TokenWeave: Efficient Compute-Communication Overlap for Distributed LLM Inference" (Gond, Kwatra, Ramjee,
2025). With weights divided over the axis "model", a layer ends its attention and its MLP with a sum over devices,
during which a single batch has nothing else to compute. Here each round runs a step on two halves of the rows. Neither
half depends on the results of the other, so a scheduler that runs collectives asynchronously can send one half while it
multiplies the other. Tokens equal those of `run`, since rows do not depend on each other.

Two parts of the paper are missing: its kernel, which joins the all-reduce with RMSNorm on a few multiprocessors of an
NVIDIA GPU, and its sizes of the parts, which fill whole waves of thread blocks. Here the rows are halved.

The compiler decides the order within a round. XLA also combines small independent all-reduces, which makes the second
half wait for the first. Compile with that pass switched off: on CPU devices by the option
`xla_disable_hlo_passes="cpu-all-reduce-combiner"`, on GPUs by `xla_gpu_all_reduce_combine_threshold_bytes=0`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from decodax.common.axes import replicas
from decodax.common.registry import FUNCTIONS
from decodax.core.algorithm import Algorithm, name_of
from decodax.core.mesh import auto_region
from decodax.core.round import step
from decodax.core.state import State
from decodax.core.types import Model, Params
from decodax.sampling import Policy
from decodax.sharding.lanes import divisible


@FUNCTIONS.register("sharding.weave",
                    "TokenWeave: Efficient Compute-Communication Overlap for Distributed LLM Inference",
                    "Gond, Kwatra and Ramjee 2025",
                    "two halves of a batch, one of which computes while the other sends")
def weave(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
          mesh: Mesh) -> State:
    """Runs up to `max_rounds` rounds of decoding (`decodax.core.round.run`) with the rows in two halves, so that one
    computes while the other waits for other devices. Call it under `jax.jit` with all arrays placed on the mesh.

    A call divides the state and its cache at the start and joins them at the end, so let one call run many rounds.
    Rounds continue until the rows of both halves have finished.

    Args:
        alg: the decoding method.
        model: the model.
        params: the weights.
        policy: the sampling policy, with a batch axis.
        s: the state.
        max_rounds: the maximum number of rounds, `i32[]`.
        mesh: a mesh with an axis "model" that divides weights. Each replica of an axis "data" has its own halves, so
            that no row moves; if it has an odd number of rows, the second half has one more.

    Returns:
        The state after the rounds.

    Raises:
        ValueError: a replica has fewer than two rows, the method works on several rows together (beams, particles), or
            the rows of the cache share memory.
    """
    divisible(s)
    if alg.traits.samples is not None:
        raise ValueError(f"alg: got {name_of(alg)}, which works on {alg.traits.samples} rows of a prompt together; "
                         "takes methods whose rows are independent")
    parts = replicas(mesh)
    if s.batch % parts or s.batch < 2 * parts:
        raise ValueError(f"s: got {s.batch} rows, takes a multiple of {parts} replicas, with at least two rows for "
                         "each")
    cut = s.batch // parts // 2

    def region(params: Params, policy: Any, s: State, bound: Array) -> State:
        policies = _halves(policy, parts, cut)

        def unfinished(carry: tuple[Array, State, State]) -> Array:
            count, first, second = carry
            return (count < bound) & (first.running.any() | second.running.any())

        def body(carry: tuple[Array, State, State]) -> tuple[Array, State, State]:
            count, first, second = carry
            return (count + 1, step(alg, model, params, policies[0], first),
                    step(alg, model, params, policies[1], second))

        _, first, second = lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), *_halves(s, parts, cut)))
        return _joined(first, second, parts)

    return auto_region(region, params, policy, s, jnp.asarray(max_rounds, jnp.int32), like=s)


def _halves(tree: Any, replicas: int, cut: int) -> tuple[Any, Any]:
    """Splits a state or policy: returns the first `cut` rows of each replica, and the other rows."""
    own = tree.own if isinstance(tree, Policy) else tree
    lanes = jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:]), own)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    parts = [jax.tree.map(lambda x, some=some: flat(x[:, some]), lanes) for some in (slice(cut), slice(cut, None))]
    first, second = (part.sharing(tree) for part in parts) if isinstance(tree, Policy) else parts
    return first, second


def _joined(first: Any, second: Any, replicas: int) -> Any:
    def one(x: Array, y: Array) -> Array:
        lanes = [z.reshape(replicas, -1, *z.shape[1:]) for z in (x, y)]
        return jnp.concatenate(lanes, 1).reshape(-1, *x.shape[1:])

    return jax.tree.map(one, first, second)
