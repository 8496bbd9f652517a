"""Lanes: each replica of the data axis runs its own loop and leaves it when its own rows are done.

Under GSPMD a batch-sharded loop asks all shards each round whether anyone still runs, and all run as long as the
slowest. Under `shard_map` over the data axis there is no such question; collectives over the model axis, inside a
replica, go on as before.

Known defect: with `Rejection` and weights sharded over the model axis a lane has hung on CPU devices, waiting for a
collective that other replicas do not reach. Plain and seed-exact decoding are tested; use those, or `run`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from decodax.core.round import run
from decodax.core.state import State
from decodax.core.types import Algorithm, Model, Params
from decodax.sharding.place import DATA, batch_specs


def lanes(alg: Algorithm, model: Model, params: Params, policy: Any, s: State, max_rounds: Array | int,
          mesh: Mesh) -> State:
    """`run`, replica by replica. Call it under `jax.jit` with everything placed on the mesh.

    Args:
        mesh: with an axis "data" over which rows are divided; other axes shard the weights as their placement says.
    """
    specs = batch_specs(s)

    def lane(params: Params, policy: Any, s: State, max_rounds: Array) -> State:
        return run(alg, model, params, policy, s, max_rounds)

    replicated = PartitionSpec()
    return jax.shard_map(lane, mesh=mesh, in_specs=(replicated, batch_specs(policy), specs, replicated),
                         out_specs=specs, axis_names={DATA}, check_vma=False)(
                             params, policy, s, jnp.asarray(max_rounds, jnp.int32))
