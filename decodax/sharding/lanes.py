"""Lanes: each replica of the data axis runs its own loop and leaves it when its own rows are done.

Under GSPMD a batch-sharded loop asks all shards each round whether anyone still runs, and all run as long as the
slowest. Under `shard_map` over the data axis there is no such question; collectives over the model axis, inside a
replica, go on as before.

On CPU devices a `collective-permute` waits for every device of the program and not only for those that it names (JAX
0.10.2), so replicas that leave their loops at different rounds would hang. There the logits, whose slices and pads
become such permutations, are gathered first; a model that permutes between devices itself has to use `run` on CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from decodax.common.axes import constrain
from decodax.core.around import AroundModel
from decodax.core.cache import Cache
from decodax.core.round import run
from decodax.core.state import State
from decodax.core.types import Algorithm, Model, Out, Params
from decodax.core.window import Window
from decodax.sharding.place import DATA, batch_specs


def lanes(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
          mesh: Mesh) -> State:
    """`run`, replica by replica. Call it under `jax.jit` with everything placed on the mesh.

    Args:
        mesh: with an axis "data" over which rows are divided; other axes shard the weights as their placement says.
    """
    divisible(s)
    specs = batch_specs(s)
    if all(d.platform == "cpu" for d in mesh.devices.flat):
        model = GatheredLogits(model)

    def lane(params: Params, policy: Any, s: State, max_rounds: Array) -> State:
        return run(alg, model, params, policy, s, max_rounds)

    replicated = PartitionSpec()
    return jax.shard_map(lane, mesh=mesh, in_specs=(replicated, batch_specs(policy), specs, replicated),
                         out_specs=specs, axis_names={DATA}, check_vma=False)(
                             params, policy, s, jnp.asarray(max_rounds, jnp.int32))


def divisible(s: State) -> None:
    """Raises ValueError where rows cannot be divided among replicas."""
    if not s.cache.layout.by_row:
        raise ValueError(f"cache: got {type(s.cache).__name__}, whose rows share memory and cannot be divided; takes "
                         "one whose arrays have a batch axis")


@dataclasses.dataclass(frozen=True)
class GatheredLogits(AroundModel):
    """`base`, its logits whole on each device."""

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        out = self.base.apply(params, window, cache)

        def head(hidden: Array) -> Array:
            return constrain(out.head(hidden), PartitionSpec())

        return dataclasses.replace(out, head=head)
