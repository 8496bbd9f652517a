"""A tree shape: a node has as many children as have nearly the probability of its likeliest one, so that the tree is a
chain where the draft is sure and wide where it is not."""

import dataclasses

import jax.numpy as jnp

import decodax as dx
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.layers import grow_layers


@dataclasses.dataclass(frozen=True)
class NearBest(Shape):
    """The best `nodes` drafts of those within `gap` nats of their likeliest sibling."""

    nodes: int = 12
    length: int = 4
    width: int = 3
    gap: float = 1.0

    def grow(self, grower, state):
        def rank(growth, slots, children, path):
            near = children.log_p >= children.log_p.max(-1, keepdims=True) - self.gap
            value = jnp.where(near, path[..., None] + children.log_p, -jnp.inf)
            return value, value

        return grow_layers(grower.ranked, state, rank, jnp.zeros((grower.s.batch, 1)), nodes=self.nodes,
                           depth=self.length, width=self.width, fanout=self.width)


@dx.algorithms.register("near-best", "An experiment", "decodax", family="speculative-tree", needs="a draft model",
                        guarantee="seed-exact")
def near_best(draft, nodes: int = 12, length: int = 4, gap: float = 1.0) -> dx.Speculative:
    """Drafts a tree that branches where several tokens are nearly as likely."""
    return dx.Speculative(dx.drafts.DraftModel(draft), shape=NearBest(nodes, length, gap=gap))
