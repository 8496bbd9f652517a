"""A step of a beam search: extends the texts of each group of beams by one token.

A round makes one step; with drafts, as many as the window has scored. Searches that rank or keep texts by other rules
(lexical constraints, a corpus) derive from `Step`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.beams.pool import Finished
from decodax.algorithms.speculative.tree import Tree
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State, Status
from decodax.core.window import take
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.draw import exponentials


@struct
class Beams(Struct):
    """State of a beam search. Each row is a live beam, and has a place for a finished text.

    Attributes:
        score: `f32[B]`, score of the live beam, with penalties; -inf: the beam is dead.
        log_prob: `f32[B]`, its log-probability, without penalties.
        beams: `i32[B, N]`, the beam that each new token continued; -1 after the last token.
        memory: additional state of each beam (surprisals, phrases that it has), or None.
        finished: the finished texts.
        ended: `i32[B]`, number of finished texts of the row's group.
        over: `bool[B]`, True if the search of the group has ended.
        drafts: state of the draft, or None.
    """

    score: Array
    log_prob: Array
    beams: Array
    memory: Any
    finished: Finished
    ended: Array
    over: Array
    drafts: Any


@struct
class BeamText(Struct):
    """Texts of `P` prompts during a round, `n` for each: the beam that a text continues, and the up to `M` tokens
    appended to it in this round. Fields have axes `[P, n]`, or `[P, n, M]` where stated.

    Attributes:
        origin: `i32`, the index in its group, from 0 to `k - 1`, of the beam that the text continues; for a finished
            text `k` plus its place in the pool.
        count: `i32`, number of appended tokens.
        tokens: `i32[..., M]`, the appended tokens.
        nodes: `i32[..., M]`, indices of the window positions whose logits they were chosen from.
        beams: `i32[..., M]`, the beam that each token continued.
        processed: `f32[..., M]`, their log-probabilities after the policy.
        score: `f32`, score of the text.
        log_prob: `f32`, its log-probability.
        status: `i32`, its `Status`.
        memory: additional state, see `Beams`.
    """

    origin: Array
    count: Array
    tokens: Array
    nodes: Array
    beams: Array
    processed: Array
    score: Array
    log_prob: Array
    status: Array
    memory: Any

    def pick(self, index: Array) -> BeamText:
        """Returns the texts at the indices `index` (`i32[P, n]`) of the second axis."""
        return jax.tree.map(lambda x: take(x, index), self)

    def join(self, other: BeamText) -> BeamText:
        """Returns these texts followed by `other` along the second axis."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), self, other)


@struct
class Group(Struct):
    """One group of each prompt's beams (`k` of them) during a round, for `P` prompts.

    Attributes:
        live: the live beams.
        finished: the finished texts.
        node: `i32[P, k]`, window index of the last token of each live beam.
        stop: `i32[P, k]`, state of the stop-string automaton after each live beam.
        ended: `i32[P]`, number of finished texts.
        over: `bool[P]`, True if the search of the group has ended.
        goes: `bool[P]`, True if it makes another step in this round.
        steps: `i32[P]`, number of steps in this round so far.
        seen: data of a derived search about the step, or None.
    """

    live: BeamText
    finished: BeamText
    node: Array
    stop: Array
    ended: Array
    over: Array
    goes: Array
    steps: Array
    seen: Any = None


class Step:
    """One step of a beam search, as a function of the groups of beams: extends every beam by one token, from the
    log-probabilities that the round's forward pass has computed.

    Args:
        alg: the search, a `BeamSearch`.
        numbers: its length penalty, patience, diversity penalty and strength.
        policy: the sampling policy.
        s: the decoding state before the round.
        processed: `f32[B, W, V]`, log-probabilities after the policy at each of the window's `W` positions.
        t: the tree of drafts in the window, or None.
    """

    def __init__(self, alg: Any, numbers: tuple[Any, ...], policy: Any, s: State, processed: Array,
                 t: Tree | None):
        self.alg, self.s, self.tree = alg, s, t
        self.length_penalty, self.patience, self.diversity, self.strength = numbers
        self.k = alg.width // alg.groups
        self.places = self.k                            # of a group's finished texts
        self.stops, self.eos = policy.stops, self.grouped(policy.eos)[:, :, 0]      # [P, G, E]
        self.cold = self.grouped(policy.greedy)[:, 0, 0]
        self.log_p = self.grouped(processed)                                        # [P, G, k, W, V]
        self.most = None if t is None or (far := s.cache.max_commit()) is None else self.grouped(far).min((1, 2))
        if t is not None:
            wide = lambda x: self.grouped(jnp.broadcast_to(jnp.asarray(x), t.tokens.shape))
            self.parents, self.tokens, self.live = wide(t.parents), wide(t.tokens), wide(t.live)

    def grouped(self, x: Array) -> Array:
        """Reshapes an array of rows, `[B, ...]`, to `[P, G, k, ...]`: `P` prompts, `G` groups of each prompt and `k`
        beams of each group."""
        return x.reshape(self.s.batch // self.alg.width, self.alg.groups, self.k, *x.shape[1:])

    def begin(self, algo: Beams) -> tuple[Group, ...]:
        """Returns the `G` groups of beams before the first step of a round, made from the state `algo` of the
        search."""
        s, k, M = self.s, self.k, self.alg.traits.emits
        started = s.length > s.prompt_length
        alone = jnp.arange(s.batch) % k == 0            # at first all live beams are the same text, which counts once
        score = jnp.where(started, algo.score, jnp.where(alone, 0, -jnp.inf))
        none = jnp.zeros((s.batch, M), jnp.int32)
        place = jnp.arange(s.batch, dtype=jnp.int32) % k

        def text(origin: Array, of: Any, score: Array, status: Array) -> BeamText:
            return BeamText(origin=origin, count=jnp.zeros_like(origin), tokens=none, nodes=none, beams=none,
                        processed=none.astype(jnp.float32), score=score, log_prob=of.log_prob, status=status,
                        memory=algo.memory)

        live = text(place, algo, score, jnp.full_like(s.status, Status.RUNNING))
        done = text(place + k, algo.finished, algo.finished.score, algo.finished.status)
        goes = s.running & ~algo.over
        parts = [jax.tree.map(lambda x, g=g: self.grouped(x)[:, g], (live, done, jnp.zeros_like(place), s.stop,
                                                                    algo.ended, algo.over, goes))
                 for g in range(self.alg.groups)]
        return tuple(Group(live=live, finished=done, node=node, stop=stop, ended=ended[:, 0], over=over[:, 0],
                           goes=goes[:, 0], steps=jnp.zeros_like(ended[:, 0]))
                     for live, done, node, stop, ended, over, goes in parts)

    def __call__(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        taken: Any = jnp.zeros((groups[0].goes.shape[0], self.log_p.shape[-1]), jnp.float32)
        after = []
        for i, g in enumerate(groups):
            new, more = self.group(i, g, taken if i else None)
            mark = lambda a, b, g=g: jnp.where(g.goes.reshape(-1, *[1] * (a.ndim - 1)), a, b)
            after.append(jax.tree.map(mark, new, g))
            taken = mark(taken.at[jnp.arange(taken.shape[0])[:, None], more].add(1, mode="drop"), taken)
        # each group depends on the tokens of earlier groups in the same step, so all make a step or none
        together = functools.reduce(jnp.logical_and, [g.goes | g.over for g in after])
        return tuple(g.replace(goes=g.goes & together) for g in after)

    def group(self, i: int, g: Group, taken: Array | None) -> tuple[Group, Array]:
        """Extends the beams of group number `i` by one token.

        Args:
            i: index of the group.
            g: the group before the step.
            taken: `f32[P, V]`, how often earlier groups took each token in this step; None for the first group.

        Returns:
            The group after the step, and the tokens that count as taken for later groups, `i32[P, n]`, padded with V.
        """
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

    def made(self, i: int, g: Group) -> tuple[Array, Array, Array]:
        """Returns, `[P, 1]` each, the number of new tokens of a text after this step (`i32`), the largest allowed
        number (`i32`), and whether an end token chosen in this step may end the text (`bool`, by the minimum number of
        new tokens)."""
        shared = lambda x: self.grouped(x)[:, i, :1]
        made = shared(self.s.length - self.s.prompt_length) + g.steps[:, None] + 1
        return made, shared(self.s.max_length - self.s.prompt_length), made > shared(self.s.min_new)

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

    def at_nodes(self, i: int, g: Group) -> Array:
        """Returns the log-probabilities of the next token after each live beam of group `i`, `f32[P, k, V]`."""
        log_p = self.log_p[:, i]
        return log_p[:, :, 0] if self.tree is None else jax.vmap(lambda x, row, node: x[row, node])(
            log_p, g.live.origin, g.node)

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

    def longer(self, i: int, g: Group, beam: Array, token: Array, own: Array, best: Array, log_p: Array
               ) -> tuple[BeamText, Array, Array]:
        """Returns the candidates as texts `[P, n]`, their states of the stop automaton, and True for those that end
        with an end token or a stop string.

        Args:
            i: index of the group.
            g: the group before the step.
            beam: `i32[P, n]`, the beam that each candidate continues.
            token: `i32[P, n]`, its last token.
            own: `f32[P, n]`, log-probability of that token.
            best: `f32[P, n]`, score of the candidate.
            log_p: `f32[P, k, V]`, log-probabilities after each live beam.
        """
        made, budget, ripe = self.made(i, g)
        eos = (token[..., None] == self.eos[:, i, None]).any(-1) & ripe
        stop, hit = take(g.stop, beam), jnp.zeros_like(eos)
        if self.stops is not None:
            stop, hit = self.stops.advance(stop, token, budget - made)
        why = jnp.where(eos, Status.EOS, jnp.where(hit & ripe, Status.STOP, Status.LENGTH)).astype(jnp.int32)
        text = g.live.pick(beam)
        here = jnp.arange(self.alg.traits.emits) == g.steps[:, None, None]
        put = lambda new, old: jnp.where(here, new[..., None], old)
        text = text.replace(
            count=text.count + 1, tokens=put(token, text.tokens), nodes=put(take(g.node, beam), text.nodes),
            beams=put(beam.astype(jnp.int32) + i * self.k, text.beams), processed=put(own, text.processed), score=best,
            log_prob=text.log_prob + own, memory=self.remember(text.memory, beam, token, own, log_p), status=why)
        return text, stop, eos | (hit & ripe)

    def remember(self, memory: Any, beam: Array, token: Array, own: Array, log_p: Array) -> Any:
        """Returns the additional state (`Beams.memory`) of texts after one more token.

        Args:
            memory: their state before it, leaves `[P, n, ...]`.
            beam: `i32[P, n]`, the beam that each text continues.
            token: `i32[P, n]`, the token.
            own: `f32[P, n]`, its log-probability.
            log_p: `f32[P, k, V]`, log-probabilities of all tokens after each beam.
        """
        return memory if (uid := self.alg.uid) is None else uid.after(memory, own, take(log_p.max(-1), beam))

    def next_nodes(self, i: int, g: Group, live: BeamText) -> tuple[Array, Array]:
        """Looks up the live beams of group `i` in the draft tree. Returns `bool[P]`, True if all live beams of a prompt
        are nodes of the tree, so that their next tokens are scored already, and `i32[P, k]`, the window indices of
        these nodes."""
        if self.tree is None:
            return jnp.zeros_like(g.over), jnp.zeros_like(g.node)
        of = lambda x: take(x[:, i], live.origin)                                       # [P, k, n]
        newest = lambda x: jnp.take_along_axis(x, g.steps[:, None, None], 2)            # [P, k, 1]
        hit = (of(self.parents) == newest(live.nodes)) & (of(self.tokens) == newest(live.tokens))
        hit = hit & of(self.live)
        return (hit.any(-1) | (live.score == -jnp.inf)).all(1), jnp.argmax(hit, -1).astype(jnp.int32)


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
