"""Two halves of a batch in one loop, so that the collectives of one overlap with the products of the other.

Source: "TokenWeave: Efficient Compute-Communication Overlap for Distributed LLM Inference" (Gond, Kwatra, Ramjee,
2025). With weights divided over the axis "model" a layer ends its attention and its MLP with a sum over devices, and in
one batch nothing else can be computed meanwhile. Here each round steps two halves of the rows. Neither reads what the
other one computes, so a scheduler that runs collectives asynchronously can send one half while it multiplies the other
one, the halves a phase apart. Tokens are those of `run`, since rows do not depend on the rows beside them.

What of the paper is not here: its kernel, which joins the all-reduce with RMSNorm on a few multiprocessors of an NVIDIA
GPU; and its sizes of the halves, which fill whole waves of thread blocks. The halves here are halves of the rows.

The order within a round is the compiler's. XLA also combines small all-reduces that are independent, and so makes the
second half wait for the first one. Compile with that pass switched off: on CPU devices by the option
`xla_disable_hlo_passes="cpu-all-reduce-combiner"`, on GPUs by `xla_gpu_all_reduce_combine_threshold_bytes=0`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from decodax.common.registry import FUNCTIONS
from decodax.core.algorithm import Algorithm, name_of
from decodax.core.mesh import auto_region
from decodax.core.round import step
from decodax.core.state import State
from decodax.core.types import Model, Params
from decodax.sampling import Policy
from decodax.sharding.lanes import divisible
from decodax.sharding.place import DATA


@FUNCTIONS.register("sharding.weave",
                    "TokenWeave: Efficient Compute-Communication Overlap for Distributed LLM Inference",
                    "Gond, Kwatra and Ramjee 2025",
                    "two halves of a batch, one of which computes while the other sends")
def weave(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
          mesh: Mesh) -> State:
    """`run` with two halves of the rows in each round. Call it under `jax.jit` with everything placed on the mesh.

    A call divides the state, and its cache, at its beginning and puts it together at its end, so let it run many
    rounds. Rounds go on until the rows of both halves have finished.

    Args:
        mesh: with an axis "model" that divides weights. Each replica of an axis "data" has its own halves, so that no
            row moves; of an odd number of rows the second half has one more.

    Raises:
        ValueError: fewer than two rows a replica, rows that the method works on together (beams, particles), or a cache
            whose rows share memory.
    """
    divisible(s)
    if alg.traits.samples is not None:
        raise ValueError(f"alg: got {name_of(alg)}, which works on {alg.traits.samples} rows of a prompt together; "
                         "takes methods whose rows know nothing of one another")
    replicas = mesh.shape.get(DATA, 1)
    if s.batch % replicas or s.batch < 2 * replicas:
        raise ValueError(f"s: got {s.batch} rows, takes two or more for each of {replicas} replicas, all the same "
                         "number")
    cut = s.batch // replicas // 2

    def region(params: Params, policy: Any, s: State, bound: Array) -> State:
        policies = _halves(policy, replicas, cut)

        def unfinished(carry: tuple[Array, State, State]) -> Array:
            count, first, second = carry
            return (count < bound) & (first.running.any() | second.running.any())

        def body(carry: tuple[Array, State, State]) -> tuple[Array, State, State]:
            count, first, second = carry
            return (count + 1, step(alg, model, params, policies[0], first),
                    step(alg, model, params, policies[1], second))

        _, first, second = lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), *_halves(s, replicas, cut)))
        return _joined(first, second, replicas)

    return auto_region(region, params, policy, s, jnp.asarray(max_rounds, jnp.int32), like=s)


def _halves(tree: Any, replicas: int, cut: int) -> tuple[Any, Any]:
    """The first `cut` rows of each replica, and the others."""
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
