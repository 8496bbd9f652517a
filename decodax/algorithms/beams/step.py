"""The state of a beam search, and the parts of its steps that do not depend on how texts are ranked and kept.

A round makes one step; with drafts, as many as the window has scored. `decodax.algorithms.beams.beam_search` has the
rule of beam search.
"""

from __future__ import annotations

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.beams.pool import Finished
from decodax.algorithms.speculative.tree import Tree
from decodax.common.struct import Struct, struct
from decodax.core.state import State, Status
from decodax.core.window import take


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
        """Returns these texts followed by those of `other`, for each prompt: `[P, n]` and `[P, n']` become `[P, n +
        n']`."""
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


class Step(abc.ABC):
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

    @abc.abstractmethod
    def group(self, i: int, g: Group, taken: Array | None) -> tuple[Group, Array]:
        """Extends the beams of group number `i` by one token.

        Args:
            i: index of the group.
            g: the group before the step.
            taken: `f32[P, V]`, how often earlier groups took each token in this step; None for the first group.

        Returns:
            The group after the step, and the tokens that count as taken for later groups, `i32[P, n]`, padded with V.
        """

    def made(self, i: int, g: Group) -> tuple[Array, Array, Array]:
        """Returns, `[P, 1]` each, the number of new tokens of a text after this step (`i32`), the largest allowed
        number (`i32`), and whether an end token chosen in this step may end the text (`bool`, by the minimum number of
        new tokens)."""
        shared = lambda x: self.grouped(x)[:, i, :1]
        made = shared(self.s.length - self.s.prompt_length) + g.steps[:, None] + 1
        return made, shared(self.s.max_length - self.s.prompt_length), made > shared(self.s.min_new)

    def at_nodes(self, i: int, g: Group) -> Array:
        """Returns the log-probabilities of the next token after each live beam of group `i`, `f32[P, k, V]`."""
        log_p = self.log_p[:, i]
        return log_p[:, :, 0] if self.tree is None else jax.vmap(lambda x, row, node: x[row, node])(
            log_p, g.live.origin, g.node)

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
