"""STAND, stochastic adaptive n-gram drafting: drafts from the target's average distribution after each n-gram
("Accelerated Test-Time Scaling with Model-Free Speculative Sampling", Song et al., 2025).

An n-gram table usually counts drawn tokens. STAND keeps for each n-gram the average of the target's next-token
distributions, limited to the most likely tokens. The longest n-gram at the end of a path that has occurred before gives
the distribution from which children are drawn: without replacement (as by Gumbel-top-k) for `MultiRound`, independently
for `Rejection`, and coupled with the target's own draws for `SeedExact`. q is the distribution from which they were
drawn, so the first two keep the target's distribution.

The paper computes its Gumbel noise once and uses it in every step. This is not done here: a draft whose noise has
already decided an earlier token is no draw from q given the text, and the target's distribution would not be kept. Each
draw has its own noise, addressed by position, node and rank. Under `SeedExact`, draft and target share noise: children
come in the order of the race that will give the target's token.

Here one distribution is kept for each place of the prompt and the output. When an n-gram is looked up, the average is
taken over its latest `places` occurrences. The paper's table keeps a running average, which is limited to the most
likely tokens after each update.

The paper has one table for all rollouts of a problem. With `share`, a row here also searches the texts of all rows of
the batch with the same prompt, finished ones included; and a later call can start with the memory that `remember`
returns. The *drafts* of a row then depend on the other rows. Its output does not, under `SeedExact` and in greedy rows;
under other verifiers its distribution does not.

As in the paper, the tree is fitted to data: it has the positions of a large tree that were accepted most often. `TREE`
is fitted to Python code. To fit a tree to other texts:

    large = Speculative(Stand(lm.vocab_size), shape=Fixed.balanced(6, 3, 2, 2, 1)) tree = fit_tree(lm, large, samples,
    nodes=15, temperature=0.8) stand = Speculative(Stand(lm.vocab_size), shape=tree)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.adaptive.fit_trees import fit_tree
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.text.history import best_places, known, matched
from decodax.algorithms.speculative.drafts.text.ngram import Paths
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.source import Answer, Level, Shape, Source
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.arguments import check_counts
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.composed import data
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k

TREE = Fixed.of([[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0],
                 [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0, 0]])
"""A tree of 15 of the 110 positions of `Fixed.balanced(5, 3, 2, 1, 1)`, fitted to Python code: `pycode` at temperature
0.8 and top-p 0.95, three samples for each of 12 held-out functions, 48 new tokens, with a shared table."""


@struct
class Memory(Struct):
    """Texts with the target's predictions after each of their places.

    Attributes:
        text: `i32[C]`, the texts one after the other, -1 after each.
        tokens: `i32[C, k]`, the most likely next tokens at each place.
        chances: `f32[C, k]`, their probabilities.
    """

    text: Array
    tokens: Array
    chances: Array


@struct
class TargetPredictions(Struct):
    """State of `Stand`: the target's predictions after each place of the text.

    Attributes:
        tokens: `i32[B, N, k]`, the most likely next tokens.
        chances: `f32[B, N, k]`, their probabilities, 0 if nothing is known.
        prompt: `i32[B]`, a hash of the prompt, to find rows with the same prompt.
        paths: within a round, contexts of the tree's nodes, else None.
    """

    tokens: Array
    chances: Array
    prompt: Array
    paths: Paths | None = None


@dataclasses.dataclass(frozen=True)
class Stand(Source):
    """A `Source` whose distribution is the average of the target's own distributions after the same n-gram (Song et
    al., 2025). If a node's last token has not occurred before, its distribution is uniform.

    Attributes:
        vocab: size of the target's vocabulary.
        order: length of the longest n-gram that is looked up, without the predicted token; the shortest has one token.
        k: number of most likely tokens kept of each distribution.
        places: largest number of occurrences that are averaged.
        shape: default shape of its tree.
        share: True: rows also search the texts of rows with the same prompt. A lookup then costs a pass over all texts
            of the batch for each row and node.
        warm: memory of earlier generations, from `remember`.

    Raises:
        ValueError: a number below 1, or `k` larger than the vocabulary.
    """

    vocab: int
    order: int = 3
    k: int = 10
    places: int = 16
    shape: Shape = TREE
    share: bool = False
    warm: Memory | None = data()

    def __post_init__(self) -> None:
        check_counts(self, "vocab", "order", "k", "places")
        if self.k > self.vocab:
            raise ValueError(f"k: got {self.k}, takes at most {self.vocab}, the vocabulary")
        if self.warm is not None and self.warm.tokens.shape[-1] != self.k:
            raise ValueError(f"warm: got {self.warm.tokens.shape[-1]} tokens of each distribution, takes {self.k}")

    @property
    def prefill_observer(self) -> Stand:
        return self

    def init(self, params: Params, s: State) -> TargetPredictions:
        shape = (*s.tokens.shape, self.k)
        return TargetPredictions(tokens=jnp.zeros(shape, jnp.int32), chances=jnp.zeros(shape, jnp.float32),
                                 prompt=hashed(s))

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        paths = Paths.start(s, self.order, room)
        return state.replace(paths=paths), Answer(self._logits(params, s, state, paths.contexts[:, :1]))

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        paths, contexts = state.paths.extend(level)
        return state.replace(paths=paths), Answer(self._logits(params, s, state, contexts))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        N = s.tokens.shape[1]
        if decision is None:
            nodes, true = None, window.live
        else:
            nodes = decision.source       # the newest token, then the accepted drafts
            true = (jnp.arange(nodes.shape[1]) < decision.count[:, None]) & s.running[:, None]
        at = jnp.where(true, window.positions if nodes is None else take(window.positions, nodes), N)
        chances, tokens = top_k(jax.nn.softmax(out.logits(nodes)), self.k)
        put = jax.vmap(lambda table, at, x: table.at[at].set(x, mode="drop"))
        return state.replace(tokens=put(state.tokens, at, tokens.astype(jnp.int32)),
                             chances=put(state.chances, at, chances), paths=None)

    def _logits(self, params: Params, s: State, seen: TargetPredictions, contexts: Array) -> Array:
        """Returns logits `f32[B, w, V]` for contexts `i32[B, w, n]`."""
        B, N = s.tokens.shape
        warm = self.warm if params.draft is None else params.draft
        # all that is known, text by text, and -1 between them; a row's history is a selection of it
        rows = jnp.pad(known(s), ((0, 0), (0, 1)), constant_values=-1)
        before = jnp.zeros(0, jnp.int32) if warm is None else jnp.asarray(warm.text)
        flat = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0))).reshape(B * (N + 1), self.k)
        tokens, chances = flat(seen.tokens), flat(seen.chances)
        if warm is not None:
            tokens, chances = jnp.concatenate([warm.tokens, tokens]), jnp.concatenate([warm.chances, chances])
        C = before.shape[0]

        def row(b: Array, contexts: Array) -> Array:
            # its own text last, since of equal matches the latest count
            mates = (b + 1 + jnp.arange(B)) % B if self.share else b[None]
            texts = jnp.where((seen.prompt[mates] == seen.prompt[b])[:, None], rows[mates], -1)
            history = jnp.concatenate([before, texts.reshape(-1)])

            def node(context: Array) -> Array:
                places, match = best_places(matched(history, context), self.places)
                here = (match == match[0]) & (match > 0)
                text = mates[jnp.maximum(places - C, 0) // (N + 1)]
                at = jnp.where(places < C, places, C + text * (N + 1) + (places - C) % (N + 1))
                total = jnp.zeros(self.vocab).at[tokens[at]].add(jnp.where(here[:, None], chances[at], 0))
                p = total / jnp.maximum(here.sum(), 1)
                return jnp.where((p > 0).any(), jnp.log(p), 0.0)

            return lax.map(node, contexts) if self.share else jax.vmap(node)(contexts)

        return jax.vmap(row)(jnp.arange(B), contexts)


@ALGORITHMS.register("stand", "Accelerated Test-Time Scaling with Model-Free Speculative Sampling", "Song et al. 2025",
                     family="speculative-tree", needs="a model", guarantee="seed-exact")
def stand(lm: Any, order: Count = 3, k: Count = 10, share: bool = True, warm: Memory | None = None,
          shape: Shape | None = None, samples: Any = None, nodes: Count = 15,
          verify: Verifier = SeedExact()) -> Speculative:
    """Drafts with n-gram tables of the target's own distributions, shared among the samples of a prompt.

    For many samples of one prompt (`num_samples`), whose texts have much in common.

    Args:
        lm: the target.
        order: length of the longest n-gram that is looked up.
        k: number of most likely tokens kept of each distribution.
        share: True: rows also search the texts of rows with the same prompt.
        warm: memory of earlier generations, from `remember`.
        shape: the draft tree; None: 15 positions fitted to Python code, or to `samples`.
        samples: prompts as token ids, to which a tree of `nodes` nodes is fitted.
        nodes: number of nodes of the fitted tree.
        verify: the rule that accepts drafts.
    """
    source = Stand(lm.vocab_size, order, min(k, lm.vocab_size), share=share, warm=warm)
    if samples is not None:
        if shape is not None:
            raise ValueError("shape: got one beside samples, to which one is fitted; takes one of the two")
        large = Speculative(source, verify, Fixed.balanced(6, 3, 2, 2, 1))
        shape = fit_tree(lm, large, samples, nodes, temperature=0.8)
    return Speculative(source, verify, shape)


def hashed(s: State) -> Array:
    """Returns a hash of each row's prompt, `i32[B]`. Rows with the same prompt share their drafts; a collision of
    different prompts affects only which drafts are made."""
    place = jnp.arange(s.tokens.shape[1], dtype=jnp.uint32)
    mixed = (s.tokens.astype(jnp.uint32) + 1) * (place * jnp.uint32(0x9E3779B1) | jnp.uint32(1))
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    total = jnp.where(place < s.prompt_length[:, None].astype(jnp.uint32), mixed, 0).sum(1, dtype=jnp.uint32)
    return (total + s.prompt_length.astype(jnp.uint32)).astype(jnp.int32)


def remember(s: State, before: Memory | None = None, most: int = 1 << 15) -> Memory:
    """Returns the predictions in a state, for `warm` in later generations; computed on the host.

    Args:
        s: a state of `Speculative(Stand(...))`, the result of `decodax.run` or of a `Job`.
        before: earlier memory, which is put before them.
        most: largest number of places to keep, the latest ones. The size is rounded up to a multiple of 1,024, since
            each size compiles a new program.

    Raises:
        ValueError: the state of another algorithm, or `most` is below 1.
    """
    seen = s.algo[0] if isinstance(s.algo, tuple) else None
    if not isinstance(seen, TargetPredictions):
        raise ValueError(f"s: got a state of {type(seen).__name__}, takes one of Speculative(Stand(...))")
    if most < 1:
        raise ValueError(f"most: got {most}, takes at least 1")
    parts: list[Any] = [] if before is None else [(before.text, before.tokens, before.chances)]
    for text, length, tokens, chances in zip(*map(np.asarray, (s.tokens, s.length, seen.tokens, seen.chances)),
                                             strict=True):
        parts.append((np.append(text[:length], -1), tokens[:length + 1], chances[:length + 1]))
    whole = [np.concatenate(each)[-most:] for each in zip(*parts, strict=True)]
    spare = -len(whole[0]) % 1024
    pad = lambda x, fill: jnp.asarray(np.pad(x, [(spare, 0)] + [(0, 0)] * (x.ndim - 1), constant_values=fill))
    return Memory(text=pad(whole[0], -1), tokens=pad(whole[1], 0), chances=pad(whole[2], 0))
