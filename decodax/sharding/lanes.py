"""Decoding in which each replica of the data axis runs its own loop and leaves it when its own rows are finished.

Under GSPMD, a loop over a sharded batch checks in each round whether any row of any shard still runs, so that all
shards run as long as the slowest. Under `shard_map` over the data axis, shards do not communicate; only the collectives
over the model axis, within a replica, remain.

On CPU devices a `collective-permute` waits for every device of the program, not only for the devices that it names (JAX
0.10.2), so replicas that leave their loops at different rounds would hang. The slices and pads of logits become such
permutations; on CPU the logits are therefore gathered first. A model that itself permutes between devices needs
`decodax.core.round.run` on CPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from decodax.common.axes import DATA, constrain
from decodax.core.algorithm import Algorithm
from decodax.core.around import AroundModel
from decodax.core.cache import Cache
from decodax.core.round import run
from decodax.core.state import State
from decodax.core.target import for_target
from decodax.core.types import Model, Out, Params
from decodax.core.window import Window
from decodax.sharding.place import batch_specs


def lanes(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
          mesh: Mesh) -> State:
    """Runs up to `max_rounds` rounds of decoding (`decodax.core.round.run`) separately on each replica of a mesh, which
    has its own rows. Call it under `jax.jit` with all arrays placed on the mesh.

    Args:
        alg: the decoding method.
        model: the model.
        params: the weights.
        policy: the sampling policy, with a batch axis.
        s: the state.
        max_rounds: the maximum number of rounds, `i32[]`.
        mesh: a mesh with an axis "data" over which rows are divided; other axes shard the weights as they are placed.

    Returns:
        The state after the rounds.

    Raises:
        ValueError: the rows of the cache share memory.
    """
    divisible(s)
    specs, alg = batch_specs(s), for_target(alg, model)
    if all(d.platform == "cpu" for d in mesh.devices.flat):
        model = GatheredLogits(model)

    def lane(params: Params, policy: Any, s: State, max_rounds: Array) -> State:
        return run(alg, model, params, policy, s, max_rounds)

    replicated = PartitionSpec()
    return jax.shard_map(lane, mesh=mesh, in_specs=(replicated, batch_specs(policy), specs, replicated),
                         out_specs=specs, axis_names={DATA}, check_vma=False)(
                             params, policy, s, jnp.asarray(max_rounds, jnp.int32))


def divisible(s: State) -> None:
    """Checks that the rows of a decoding state can be divided among replicas, which they cannot if they share memory.

    Raises:
        ValueError: the rows of the cache share memory.
    """
    if not s.cache.layout.by_row:
        raise ValueError(f"cache: got {type(s.cache).__name__}, whose rows share memory and cannot be divided; takes "
                         "one whose arrays have a batch axis")


@dataclasses.dataclass(frozen=True)
class GatheredLogits(AroundModel):
    """Wraps a model `base`: the outputs are the same, but the logits are replicated on all devices."""

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        out = self.base.apply(params, window, cache)

        def head(hidden: Array) -> Array:
            return constrain(out.head(hidden), PartitionSpec())

        return dataclasses.replace(out, head=head)
