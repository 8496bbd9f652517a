"""The rule of beam search: which extensions of the live beams of a prompt live on, and which texts are finished.

It is that of the vectorised search of transformers. Searches that rank or keep texts by other rules (lexical
constraints, a corpus) derive from `BeamStep`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.beams.step import BeamText, Group, Step
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import Status
from decodax.core.window import take
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.draw import exponentials


class BeamStep(Step):
    """A step of beam search: ranks the extensions of all live beams of a prompt by one token. Of the best `k` those
    that end join the finished texts, and the best `k` others are the new live beams."""

    def group(self, i: int, g: Group, taken: Array | None) -> tuple[Group, Array]:
        alg, k = self.alg, self.k
        log_p = self.at_nodes(i, g)                                                     # [P, k, V]
        V = log_p.shape[-1]
        total = self.totals(g, log_p, taken)
        beam, token = largest(self.ranks(i, g, total), self.candidates(V))
        row = jnp.arange(beam.shape[0])[:, None]
        at = lambda x: x[row, beam, token]
        best = at(total)
        text, stop, closed = self.longer(i, g, beam, token, at(log_p), best, log_p)

        # texts among the first k that end join the finished ones; the best of the others live on
        first = jnp.arange(beam.shape[1]) < k
        chosen = lax.top_k(jnp.where(closed, -jnp.inf, best), k)[1]
        counted = jnp.where(best > -jnp.inf, token, V)
        counted = counted[:, :2 * k] if alg.counting == "candidates" else take(counted, chosen)
        return self.after(i, g, text, stop, closed, first, chosen), counted

    def totals(self, g: Group, log_p: Array, taken: Array | None) -> Array:
        """Returns the score of each live beam extended by each token, `f32[P, k, V]`; -inf for forbidden tokens.
        `log_p` are the tokens' log-probabilities in the same shape, and `taken` is as in `group`."""
        gain = log_p
        if (uid := self.alg.uid) is not None:
            known = jax.tree.map(lambda x: x[..., None], g.live.memory)
            after = uid.after(known, log_p, log_p.max(-1, keepdims=True))
            gain = log_p - self.strength * (uid.value(after) - uid.value(known))
        if taken is not None:
            gain = gain - self.diversity * taken[:, None]
        return g.live.score[..., None] + jnp.where(log_p == -jnp.inf, -jnp.inf, gain)

    def candidates(self, vocabulary: int) -> int:
        """Returns the number of best candidates to rank in a step, so that at least `k` of them do not end their text.

        Each of the `k` beams has at most `E` candidates that end it, one for each end token, so `(1 + E) * k` are
        enough.

        Args:
            vocabulary: size of the vocabulary.
        """
        return min(max(2, 1 + self.eos.shape[-1]) * self.k, self.k * vocabulary)

    def ranks(self, i: int, g: Group, total: Array) -> Array:
        """Returns the values by which the extensions of group `i` are ranked, `f32[P, k, V]`: their scores `total`,
        plus Gumbel noise for prompts that sample (temperature above 0), so that the best ones are draws without
        replacement."""
        P, k, V = total.shape

        def drawn() -> Array:
            # each place draws by its own address, whichever text it holds
            keys_of, place = self.grouped(self.s.key)[:, i], self.grouped(self.s.length)[:, i] + g.steps[:, None]
            address = keys.addresses(keys_of.reshape(-1), place.reshape(-1, 1), Purpose.TOKEN)
            noise = -jnp.log(exponentials(address[:, 0], V)).reshape(P, k, V)
            return total + jnp.where(self.cold[:, None, None], 0, noise)

        return lax.cond(self.cold.all(), lambda: total, drawn)

    def after(self, i: int, g: Group, text: BeamText, stop: Array, closed: Array, may: Array, chosen: Array) -> Group:
        """Returns the group after a step.

        Args:
            i: index of the group.
            g: the group before the step.
            text: the candidates, `[P, n]`.
            stop: their states of the stop automaton.
            closed: `bool[P, n]`, True for those that end with an end token or a stop string.
            may: `bool[n or P, n]`, candidates that become finished texts if they end.
            chosen: `i32[P, k]`, candidates that become live beams; with score -inf or if closed, the beam is dead.
        """
        alg, places = self.alg, self.places
        made, budget, _ = self.made(i, g)
        ends = closed | (made >= budget)
        norm = lambda length: length.astype(jnp.float32) ** self.length_penalty
        joins = ends & may & (text.score > -jnp.inf)
        done = g.finished.join(text.replace(score=jnp.where(joins, text.score / norm(made), -jnp.inf)))
        done = done.pick(lax.top_k(done.score, self.k)[1])
        done = done.replace(score=jnp.where(jnp.arange(self.k) < places, done.score, -jnp.inf))
        score = take(jnp.where(ends, -jnp.inf, text.score), chosen)
        # a dead beam is a copy of the best, so that it neither ends nor asks for a node of its own
        best = jnp.argmax(score, 1)[:, None]
        going = jnp.where(score == -jnp.inf, take(chosen, best), chosen)
        live = text.pick(going).replace(score=score, status=jnp.full_like(going, Status.RUNNING, jnp.int32))

        # was that the last step?
        ended = g.ended + joins.sum(1, dtype=jnp.int32)
        top = score.max(1)
        if alg.early_stopping is True:
            goes = (top > -jnp.inf) & (ended < self.patience * places)
        else:
            longest = jnp.where(self.length_penalty > 0, budget, made) if alg.early_stopping == "never" else made
            goes = (top > -jnp.inf) & (top / norm(longest)[:, 0] > done.score[:, places - 1])
        over = ~goes | (made >= budget)[:, 0]

        steps = g.steps + 1
        goes, node = self.next_nodes(i, g, live)
        goes = goes & ~over & (steps < alg.traits.emits)
        if self.most is not None:
            goes = goes & (steps < self.most)
        return Group(live=live, finished=done, node=node, stop=take(stop, going), ended=ended, over=over, goes=goes,
                     steps=steps)


def largest(ranks: Array, count: int) -> tuple[Array, Array]:
    """Returns beam and token of the `count` largest values in `ranks`, both `i32[P, count]`; of equal values the first
    comes first.

    The best tokens of each beam are found first, so that a vocabulary sharded over devices stays sharded.

    Args:
        ranks: `f32[P, k, V]`, value of each token after each beam.
        count: number of results.

    >>> beam, token = largest(jnp.array([[[1.0, 3.0, 0.0], [3.0, 2.0, 5.0]]]), 3)
    >>> beam.tolist(), token.tolist()
    ([[1, 0, 1]], [[2, 1, 0]])
    """
    best, token = top_k(ranks, min(count, ranks.shape[-1]))
    index = lax.top_k(best.reshape(len(best), -1), count)[1]
    return index // best.shape[-1], jnp.take_along_axis(token.reshape(len(token), -1), index, 1)
