"""A draft: the most frequent follower of each token, learned from the prompt and from what has been written."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

import decodax as dx
from decodax.algorithms.speculative.source import Draft
from decodax.algorithms.speculative.tree import chain
from decodax.common.struct import Struct, struct


@struct
class Votes(Struct):
    """`follower` and `votes`, `i32[B, slots]`; `taken` `i32[B]`, tokens of the text whose followers are counted."""

    follower: Array
    votes: Array
    taken: Array


@dataclasses.dataclass(frozen=True)
class Bigram(Draft):
    """A majority vote (Boyer and Moore) for each token; tokens that are equal modulo `slots` share one."""

    length: int = 4
    slots: int = 1024

    def init(self, params, s):
        empty = jnp.full((s.batch, self.slots), -1, jnp.int32)
        return Votes(follower=empty, votes=jnp.zeros_like(empty), taken=jnp.zeros(s.batch, jnp.int32))

    def propose(self, params, policy, s, state, drawn):
        state = jax.vmap(self.learn)(state, s.tokens, s.length)

        def walk(token, _):
            new = jnp.take_along_axis(state.follower, (token % self.slots)[:, None], 1)[:, 0]
            new = jnp.where(token >= 0, new, -1)
            return new, new

        _, tokens = jax.lax.scan(walk, s.newest, length=self.length)
        return chain(jnp.maximum(tokens.T, 0), (tokens.T >= 0).sum(1)), state

    def learn(self, table, text, length):
        def vote(i, table):
            at, new = text[i] % self.slots, text[i + 1]
            votes = table.votes[at] + jnp.where(table.follower[at] == new, 1, -1)
            follower = jnp.where(votes < 0, new, table.follower[at])
            return table.replace(follower=table.follower.at[at].set(follower),
                                 votes=table.votes.at[at].set(jnp.where(votes < 0, 1, votes)))

        return jax.lax.fori_loop(table.taken, length - 1, vote, table).replace(taken=length - 1)


@dx.algorithms.register("bigram", "An experiment", "decodax", family="speculative-linear", guarantee="seed-exact")
def bigram(length: int = 4, slots: int = 1024) -> dx.Speculative:
    """Drafts the most frequent follower of each token."""
    return dx.Speculative(Bigram(length, slots))
