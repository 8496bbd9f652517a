"""Drafts, sources and diffusion rules: REST (a draft with weights), Cacheback (a draft with state), pairs of tokens (a
source of distributions), a draft around another one, and a rule of masked diffusion.

All of it runs as one program, `tests/extending` runs it, and the pages of docs/extending explain the contracts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax import algorithms
from decodax.algorithms.diffusion import Adapter, Blocks, MaskedDiffusion, Unmask
from decodax.algorithms.speculative.drafter import AroundSource
from decodax.algorithms.speculative.drafts.text.history import prefix_tree, tail
from decodax.algorithms.speculative.drafts.text.sam_decoding import suffix_array
from decodax.algorithms.speculative.source import Answer, Draft, Source
from decodax.common.struct import Struct, struct
from decodax.core.composed import data
from decodax.models import Transformer, llama
from decodax.models.diffusion import Diffusion

network = Transformer(llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256))
weights = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, network.init_params(jax.random.key(1)))
lm = dx.LM(model=network, params=weights, vocab_size=16)

prompts = [[1, 2, 3, 4], [9, 3], [5, 5, 5, 2, 7, 1]]
plain = dx.generate(lm, prompts, max_new_tokens=24)
sampled = dx.generate(lm, prompts, max_new_tokens=24, temperature=0.7, seed=3)


LAST = np.iinfo(np.int32).max


def datastore(documents: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Documents of token ids one after another, -1 after each: `text` `i32[C]`, and where its suffixes begin in sorted
    order: `order` `i32[C]`."""
    text = np.concatenate([np.array([*document, -1], np.int32) for document in documents])
    return dict(text=text, order=suffix_array(text).astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Rest(Draft):
    """Retrieval-based speculative decoding (He et al. 2023).

    Attributes:
        store: from `datastore`.
        longest: the longest suffix that is looked up, 16 in the authors' code; the shortest has 2 tokens.
        matches: occurrences whose continuations are read, the first in sorted order; 5,000 in the authors' code.
        length: tokens of each continuation. nodes: drafts of a tree, 64 in the authors' code.
    """

    store: Any = data()
    longest: int = 8
    matches: int = 16
    length: int = 6
    nodes: int = 24
    proposes = frozenset(("trees",))

    def propose(self, params, policy, s, state, drawn):
        find = lambda context: self.continuations(params.draft, context)
        paths, found = jax.vmap(find)(tail(s, self.longest))
        return prefix_tree(paths, found.astype(jnp.int32), self.nodes), state

    def continuations(self, store, context):
        """What followed the longest suffix of `context` (`i32[longest]`) that is followed by anything: `i32[matches,
        length]`, -1 behind each one's end, and which of them are real, `bool[matches]`."""
        sizes = jnp.arange(2, self.longest + 1)
        first, behind = jax.vmap(lambda size: self.places(store, context, size))(sizes)
        occurs = (behind > first) & (context[self.longest - sizes] >= 0)
        best = self.longest - 2 - jnp.argmax(occurs[::-1])                  # the longest that occurs
        index = first[best] + jnp.arange(self.matches)
        found = occurs.any() & (index < behind[best])
        begin = store["order"][jnp.minimum(index, store["order"].shape[0] - 1)] + sizes[best]
        tokens = read(store["text"], begin[:, None] + jnp.arange(self.length))
        inside = jnp.cumprod(tokens >= 0, 1) > 0
        return jnp.where(found[:, None] & inside, tokens, -1), found

    def places(self, store, context, size):
        """Which places of the sorted order begin with the last `size` tokens of `context` and go on: from, to."""
        at = jnp.arange(self.longest + 1)
        query = jnp.where(at < size, jnp.roll(jnp.append(context, 0), size - self.longest), 0)
        return (bisect(store, query, size + 1), bisect(store, jnp.where(at == size, LAST, query), size + 1))


def read(text, index):
    """`text[index]`, -1 beyond its end."""
    return jnp.where(index < text.shape[0], text[jnp.minimum(index, text.shape[0] - 1)], -1)


def bisect(store, query, size):
    """How many suffixes are smaller than the first `size` tokens of `query` (`i32[Q]`): `i32[]`."""
    text, order = jnp.asarray(store["text"]), jnp.asarray(store["order"])
    at = jnp.arange(query.shape[0])

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        there = read(text, order[jnp.minimum(middle, order.shape[0] - 1)] + at)
        differs = (there != query) & (at < size)
        place = jnp.argmax(differs)
        smaller = differs.any() & (there[place] < query[place]) & (low < high)
        return jnp.where(smaller, middle + 1, low), jnp.where(smaller | (low == high), high, middle)

    bounds = (jnp.int32(0), jnp.int32(order.shape[0]))
    return jax.lax.fori_loop(0, order.shape[0].bit_length() + 1, halve, bounds)[0]


store = datastore([[*prompt, *plain.row(i).tolist()] for i, prompt in enumerate(prompts)])
rest = dx.Speculative(Rest(store))

fast = dx.generate(lm, prompts, max_new_tokens=24, algorithm=rest)
assert [fast.row(i).tolist() for i in range(3)] == [plain.row(i).tolist() for i in range(3)]
assert fast.stats.accepted.sum() > 0
print(fast.stats.tokens_per_forward)                                     # plain decoding has 1

again = dx.generate(lm, prompts, max_new_tokens=24, temperature=0.7, seed=3, algorithm=rest)
assert [again.row(i).tolist() for i in range(3)] == [sampled.row(i).tolist() for i in range(3)]


@struct
class Table(Struct):
    """Of each row: `leaders` `i32[B, R, leader]`; `followers` `i32[B, R, F, follower]`, the most recent first and -1
    where there is none; `used` `i32[B, R]`, the n-gram that was the leader's last, -1 for none; `taken` `i32[B]`, how
    many n-grams of the text have been put in."""

    leaders: jax.Array
    followers: jax.Array
    used: jax.Array
    taken: jax.Array


@dataclasses.dataclass(frozen=True)
class Cacheback(Draft):
    """Cacheback decoding (Ma, Gim, Zhong 2025).

    Attributes:
        leader, follower: tokens of each. leaders, followers: how many leaders a table has, and followers a leader. The
            defaults, and which entry goes first, are those of a public implementation that is not the authors'.
        levels: how often followers are looked up for the end of a path.
    """

    leader: int = 1
    follower: int = 2
    leaders: int = 256
    followers: int = 4
    levels: int = 1
    proposes = frozenset(("trees",))

    @property
    def length(self):
        return self.levels * self.follower

    def init(self, params, s):
        B, R, F = s.batch, self.leaders, self.followers
        full = lambda *shape: jnp.full((B, *shape), -1, jnp.int32)
        return Table(leaders=full(R, self.leader), followers=full(R, F, self.follower), used=full(R),
                     taken=jnp.zeros(B, jnp.int32))

    def propose(self, params, policy, s, state, drawn):
        state = jax.vmap(self.learn)(state, s.tokens, s.length)
        paths = jax.vmap(self.paths)(state, tail(s, self.leader))
        nodes = sum(self.followers ** i * self.follower for i in range(1, self.levels + 1))
        return prefix_tree(paths, jnp.ones(paths.shape[:2], jnp.int32), nodes), state

    # of one row, without the batch axis

    def learn(self, table, text, length):
        """The table with all n-grams of the first `length` tokens of `text`."""
        def put(i, table):
            leader = jax.lax.dynamic_slice(text, (i,), (self.leader,))
            follower = jax.lax.dynamic_slice(text, (i + self.leader,), (self.follower,))
            same = (table.leaders == leader).all(-1)
            # its own place, or the one that was used least recently; unused ones have -1 and go first
            at = jnp.where(same.any(), jnp.argmax(same), jnp.argmin(table.used))
            old = jnp.where(same.any(), table.followers[at], -1)
            # the follower goes to the front; those before its old place, or all but the last, move back by one
            known = (old == follower).all(-1)
            back = jnp.arange(self.followers) <= jnp.where(known.any(), jnp.argmax(known), self.followers - 1)
            new = jnp.where(back[:, None], jnp.roll(old, 1, 0), old).at[0].set(follower)
            return table.replace(leaders=table.leaders.at[at].set(leader), followers=table.followers.at[at].set(new),
                                 used=table.used.at[at].set(i))

        count = jnp.maximum(length - self.leader - self.follower + 1, 0)
        return jax.lax.fori_loop(table.taken, count, put, table).replace(taken=count)

    def paths(self, table, context):
        """What may follow `context` (`i32[leader]`): `i32[followers ** levels, length]`, -1 behind each one's end."""
        def followers(leader):
            same = (table.leaders == leader).all(-1) & (table.used >= 0)
            return jnp.where(same.any(), table.followers[jnp.argmax(same)], -1)

        ends, paths = context[None], jnp.zeros((1, 0), jnp.int32)
        for _ in range(self.levels):
            new = jax.vmap(followers)(ends).reshape(-1, self.follower)
            join = lambda x, new=new: jnp.concatenate([jnp.repeat(x, self.followers, 0), new], 1)
            ends, paths = join(ends)[:, -self.leader:], join(paths)
        return paths


cacheback = dx.Speculative(Cacheback(leaders=32, followers=3, levels=2))
fast = dx.generate(lm, prompts, max_new_tokens=24, algorithm=cacheback)
assert [fast.row(i).tolist() for i in range(3)] == [plain.row(i).tolist() for i in range(3)]
assert fast.stats.accepted.sum() > 0


@dataclasses.dataclass(frozen=True)
class Pairs(Source):
    """Drafts by how often a token followed another: `counts` is `f32[V, V]`."""

    counts: Any = data()

    def start(self, params, s, state, room):
        return state, Answer(jnp.log(params.draft[s.newest] + 0.1)[:, None])

    def extend(self, params, s, state, level):
        return state, Answer(jnp.log(params.draft[level.tokens] + 0.1))


counts = np.zeros((16, 16), np.float32)
for text in ([*prompt, *plain.row(i).tolist()] for i, prompt in enumerate(prompts)):
    np.add.at(counts, (text[:-1], text[1:]), 1)

tree = dx.Speculative(Pairs(counts), shape=dx.trees.ConfidenceTree(nodes=8, length=3, width=2))
fast = dx.generate(lm, prompts, max_new_tokens=24, algorithm=tree)
assert [fast.row(i).tolist() for i in range(3)] == [plain.row(i).tolist() for i in range(3)]

others = dx.Speculative(Pairs(counts), verify=dx.verify.Rejection(), shape=dx.trees.Chain(3))
fast = dx.generate(lm, prompts, max_new_tokens=24, temperature=0.7, algorithm=others)
print(others.traits.guarantee, fast.stats.draft_acceptance_rate)


@dataclasses.dataclass(frozen=True)
class ExceptAfter(AroundSource, Draft):
    """The drafts of `source`, and none where the newest token is `token`."""

    source: Draft
    token: int

    @property
    def length(self):
        return self.source.length

    def propose(self, params, policy, s, state, drawn):
        proposal, state = self.source.propose(params, policy, s, state, drawn)
        return proposal.replace(live=proposal.live & (s.newest != self.token)[:, None]), state


some = dx.Speculative(ExceptAfter(Rest(datastore([plain.row(0).tolist()])), token=3))
fast = dx.generate(lm, prompts, max_new_tokens=24, algorithm=some)
assert [fast.row(i).tolist() for i in range(3)] == [plain.row(i).tolist() for i in range(3)]


@dataclasses.dataclass(frozen=True)
class FallingMargin(Unmask):
    """Candidates whose margin is at least `high * decay ** step`; the steps are those of the block."""

    high: float = 0.9
    decay: float = 0.8

    def __call__(self, view, seen, score, memory):
        bar = self.high * self.decay ** view.step.astype(jnp.float32)
        return seen.model.margin >= bar[:, None]


filler = dx.LM(model=network, params=weights, vocab_size=16, diffusion=Diffusion(mask=15))
sampler = MaskedDiffusion(Adapter.of(filler), Blocks(8), unmask=FallingMargin(high=0.3, decay=0.5))
out = dx.generate(filler, prompts, max_new_tokens=16, algorithm=sampler)
print(out.stats.tokens_per_forward)


@algorithms.register("rest", "REST: Retrieval-Based Speculative Decoding", "He et al. 2023", family="speculative-tree",
                     guarantee="seed-exact")
def make_rest(documents: Sequence[Sequence[int]], longest: int = 16, nodes: int = 64) -> dx.Speculative:
    """Drafts what followed the longest suffix in a datastore of texts."""
    return dx.Speculative(Rest(datastore(documents), longest=longest, nodes=nodes))


@algorithms.register("cacheback", "Cacheback: Speculative Decoding With Nothing But Cache", "Ma, Gim, Zhong 2025",
                     family="speculative-tree", guarantee="seed-exact")
def make_cacheback(leaders: int = 256, followers: int = 4, levels: int = 1) -> dx.Speculative:
    """Drafts n-grams from a table that forgets the least recently used."""
    return dx.Speculative(Cacheback(leaders=leaders, followers=followers, levels=levels))


@algorithms.register("falling-margin", "A rule of decodax's guides", "decodax", family="masked-diffusion",
                     needs="a diffusion model", guarantee="approximate")
def make_falling_margin(lm, block: int = 8, high: float = 0.9, decay: float = 0.8) -> MaskedDiffusion:
    """Unmasks all candidates above a margin that falls with the step."""
    return MaskedDiffusion(Adapter.of(lm), Blocks(block), unmask=FallingMargin(high, decay))


fast = dx.generate(lm, prompts, max_new_tokens=24, algorithm="cacheback:leaders=32,followers=3,levels=2")
out = dx.generate(filler, prompts, max_new_tokens=16, algorithm="falling-margin:high=0.3,decay=0.5")
