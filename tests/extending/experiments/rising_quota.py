"""A rule of masked diffusion: the candidates of largest margin, one in the first step of a block and `slope` more in
each further step."""

import dataclasses

import jax.numpy as jnp

import decodax as dx
from decodax.algorithms.diffusion import Adapter, Blocks, MaskedDiffusion, Unmask


@dataclasses.dataclass(frozen=True)
class RisingQuota(Unmask):
    """The `1 + slope * step` candidates of largest margin, rounded down."""

    slope: float = 0.5

    def __call__(self, view, seen, score, memory):
        quota = 1 + jnp.floor(self.slope * view.step).astype(jnp.int32)
        margin = jnp.where(view.active & seen.reached, seen.model.margin, -jnp.inf)
        place = jnp.argsort(jnp.argsort(-margin, axis=-1), axis=-1)
        return (place < quota[:, None]) & (margin > -jnp.inf)


@dx.algorithms.register("rising-quota", "An experiment", "decodax", family="masked-diffusion",
                        needs="a diffusion model", guarantee="approximate")
def rising_quota(lm, block: int = 8, slope: float = 0.5) -> MaskedDiffusion:
    """Unmasks more candidates from step to step, those of largest margin first."""
    return MaskedDiffusion(Adapter.of(lm), Blocks(block), unmask=RisingQuota(slope))
