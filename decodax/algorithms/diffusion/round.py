"""One round of masked diffusion: a wide forward pass over the whole text, or a narrow one with the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.canvas import Canvas, cut, look, paste, survey
from decodax.algorithms.diffusion.predict import predictions, side_by_side
from decodax.algorithms.diffusion.view import Seen, View
from decodax.core.algorithm import Algorithm, variants
from decodax.core.around import Around
from decodax.core.state import State
from decodax.core.types import CanvasNodes, Decision, Out, Params
from decodax.core.window import Window, take


@dataclasses.dataclass(frozen=True)
class Round(Around):
    """One kind of round of a masked-diffusion sampler, as an algorithm of its own.

    Attributes:
        of: the sampler.
        wide: True: the forward pass computes the whole text, and writes the cache if there is one. False: it computes
            some positions and attends to the cache for the others.
        size: number of positions of a narrow forward pass in each row; None: all that the caching rule gives.
        phase: index in the caching rule's `phases`; None if the rule has none.
    """

    of: Algorithm
    wide: bool
    size: int | None = None
    phase: int | None = None

    @property
    def inner(self) -> Any:
        return self.of

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        return ()

    @property
    def branches(self) -> int:
        """Number `K` of canvases of a row that a forward pass scores. It is 1 in wide rounds that fill a cache, since
        these begin a window, for which there are no drafts yet."""
        return 1 if self.wide and self.inner.caching.narrow else len(self.inner.verify.taken)

    def _turn(self, s: State) -> Array:
        """Returns the rows that take part, `bool[B]`."""
        if not variants(self.inner):
            return s.running
        mine = self.inner.needs_refresh(s) == self.wide if self.phase is None else self.inner.phase(s) == self.phase
        return s.running & mine

    def wrap_model(self, model: Any) -> Any:
        """Returns the model that this round calls: `model`, or the caching rule's wrapper of it for `phase`."""
        return model if self.phase is None else self.inner.caching.wrap_model(model, self.phase)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Canvas]:
        c: Canvas = s.algo
        of, attention = self.inner, self.inner.adapter.attention
        text = self._text(s, c)
        turn, nodes = self._turn(s), self._nodes(s, text)
        positions, live = nodes.positions, nodes.live
        mask = attention.sees(nodes, jnp.maximum(c.final, c.start))
        tokens = take(text.tokens, positions)
        cached = c.valid[:, :0]
        if not self.wide:
            slots = jnp.arange(c.valid.shape[1], dtype=jnp.int32)
            again = _scatter(jnp.zeros(c.valid.shape, bool), positions, live, live)
            cached = c.valid & ~again & (slots < self._end(s, text)[:, None])
        live = live & turn[:, None]
        if (K := self.branches) > 1:
            tokens = self._branch_tokens(of.drafts(look(s, c, of.windows.width), c).tokens, positions, tokens, c)
            positions, live = jnp.tile(positions, (1, K)), jnp.tile(live, (1, K))
            if of.traits.caches:       # canvases share the row's cache, so they stand in one window
                mask = side_by_side(mask, K)
            else:               # and are rows of their own where they share nothing
                split = lambda x: x.reshape(s.batch * K, -1)
                tokens, positions, live = split(tokens), split(positions), split(live)
                mask = jnp.repeat(mask, K, 0)
        hint = None if self.phase is None else of.caching.hint(look(s, c, of.windows.width), positions, self.phase)
        if c.expected is not None:
            offset = jnp.clip(positions - c.start[:, None], 0, of.windows.width - 1)
            hint = CanvasNodes(inside=nodes.own & (positions >= c.start[:, None]), start=c.start,
                               expected=take(c.expected, offset))
        return Window(tokens=tokens, positions=positions, mask=mask, live=live, cached=cached,
                      hints=() if hint is None else (hint,)), c

    def _text(self, s: State, c: Canvas) -> Canvas:
        """Returns the canvas for the model. After an early end it contains the tokens that the stop rule fills in."""
        if not any(stop.filled for stop in self.inner.stops):
            return c
        N = c.tokens.shape[1]
        end = jnp.maximum(c.end, jnp.minimum(s.max_length, N - self.inner.windows.width))
        last = take(c.tokens, jnp.maximum(c.end - 1, 0)[:, None])
        return c.replace(tokens=jnp.where(jnp.arange(N) >= c.end[:, None], last, c.tokens), end=end)

    def _nodes(self, s: State, c: Canvas) -> Nodes:
        """Returns the nodes that this round computes."""
        of, attention, N, W = self.inner, self.inner.adapter.attention, c.tokens.shape[1], self.inner.windows.width
        # before the first round the entry of a prefilled prompt's last token is missing
        left = int(of.adapter.shift or of.traits.prefills)
        waits = c.final > c.start
        front = jnp.where(waits, c.final, c.start)
        if self.wide:
            positions = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), c.tokens.shape)
            own = positions >= front[:, None]
            if attention.joined:
                positions = jnp.concatenate([positions, front[:, None] - 1], 1)
                own = jnp.pad(own, ((0, 0), (0, 1)), constant_values=True)
            nodes = Nodes(positions=positions, live=positions >= 0, own=own)
        else:
            nodes = of.caching.nodes(survey(s, c, W), left, c.memory["caching"])
            first = front if not attention.joined else jnp.where(waits, front, front - 1)
            own = nodes.own & (nodes.positions >= first[:, None])
            # a final token has one node, unless the window sees it through a copy
            twice = ~nodes.own & (nodes.positions >= c.start[:, None] - left) & (not attention.joined)
            nodes = nodes.replace(own=own, live=nodes.live & ~twice)
        end = attention.reach(c.start, W, self._end(s, c))
        nodes = Nodes(positions=jnp.clip(nodes.positions, 0, N - 1), own=nodes.own,
                      live=nodes.live & (nodes.positions < end[:, None]))
        nodes = nodes if self.wide or self.size is None else _packed(nodes, self.size)
        return nodes.replace(prompt=s.prompt_length)

    def _end(self, s: State, c: Canvas) -> Array:
        """Returns the end of the positions that are attended to, `i32[B]`."""
        return self.inner.whole(s) if self.inner.caching.beyond else c.end

    def live_nodes(self, s: State) -> Array:
        """Returns the number of positions that a narrow forward pass has to compute in each row, without padding:
        `i32[B]`."""
        return self._nodes(s, self._text(s, s.algo)).live.sum(1, dtype=jnp.int32)

    def _branch_tokens(self, drafts: Array, positions: Array, tokens: Array, c: Canvas) -> Array:
        """Returns the nodes' tokens once for each draft, `i32[B, K * n]`; the tokens of the draft (`i32[B, K, W]`)
        replace those of the window."""
        W = drafts.shape[-1]
        offset = positions - c.start[:, None]
        inside = (offset >= 0) & (offset < W)
        own = jax.vmap(take, (1, None), 1)(drafts, jnp.clip(offset, 0, W - 1))
        return jnp.where(inside[:, None], own, tokens[:, None]).reshape(tokens.shape[0], -1)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Canvas) -> Decision:
        c, of = algo, self.inner
        K, W, B = self.branches, of.windows.width, s.batch
        nodes = self._nodes(s, self._text(s, c))
        positions, n = nodes.positions, nodes.positions.shape[1]
        turn, view = self._turn(s), look(s, c, W, dist.policy.eos)
        live = nodes.live & turn[:, None]
        waits = c.final > c.start       # final tokens that this round's forward persists
        works = turn if of.caching.fused else turn & ~waits

        drafts = jax.tree.map(lambda x: x[:, :K], of.drafts(view, c))
        node = self._predicting(view, nodes.replace(live=live), c.tokens.shape[1])
        seen, note, entries, expected = predictions(of, params, dist, s, c, drafts, node, out)
        flat = jax.tree.map(lambda x: x.reshape(B * K, *x.shape[2:]), drafts)
        results = of.advance(flat, seen, c.memory)
        rows = lambda tree: jax.tree.map(lambda x: x.reshape(B, K, *x.shape[1:]), tree)
        results, answers = rows(results), rows(seen)
        path = of.verify.path(drafts, results) if K > 1 else jnp.ones((B, 1), bool)
        pick = jnp.where(path, jnp.arange(K, dtype=jnp.int32), 0).max(1)
        chosen = lambda tree: jax.tree.map(lambda x: take(x, pick[:, None])[:, 0], tree)
        after, answer = chosen(results), chosen(answers)
        broken = jnp.where(view.masked & answer.reached, jnp.minimum(answer.token, 0), 0).min(1)
        broken = jnp.where(works, broken, 0)
        works = works & (broken == 0)
        before = chosen(drafts)
        after, noted = self._noted(view, after, drafts, results, answers, path, c, note)

        # final positions, emitted tokens, and the next window
        front = jnp.maximum(c.final, c.start)       # all before it has final tokens, which this forward saw
        # a text that a stop rule has ended is not remasked any more: the token that ends it might go
        busy = of.remask.busy(before, after, c.memory["remask"]) & (after.end == view.end)
        count = of.windows.finished(after, c.memory["windows"])
        # a window that overhangs the budget is done when the positions before its end are decided
        left = (after.masked & (after.positions < s.max_length[:, None])).any(1)
        count = jnp.where(left | (after.end <= s.max_length), count, jnp.clip(s.max_length - c.start, 0, W))
        count = jnp.where(busy, 0, count)
        done = c.start + jnp.where(works, count, 0)
        ok = turn & (broken == 0)
        if not of.caching.persists:
            emitted = start = done
        elif of.caching.fused:
            emitted, start = c.start, done
        else:
            emitted = start = jnp.where(ok & waits, c.final, c.start)
        emit = jnp.where(ok, jnp.clip(emitted - s.length, 0, W), 0)
        writes, valid = self._writes(
            survey(s, c, W), c, positions, live & ok[:, None] & ~(nodes.own & (positions < front[:, None])), front)

        moved = start > c.start
        write = lambda old, new: jnp.where(_per_row(works, old), paste(old, new, c.start), old)
        step = lambda old, new: jnp.where(works, jnp.where(moved, 0, new), old)
        again = c.replace(
            tokens=write(c.tokens, after.tokens), open=write(c.open, after.open), when=write(c.when, after.when),
            confidence=write(c.confidence, after.confidence), start=start, final=jnp.maximum(c.final, done),
            end=jnp.where(works, after.end, c.end), step=jnp.where(moved, 0, step(c.step, after.step)),
            round=jnp.where(works, after.round, c.round), full=jnp.where(moved, 0, step(c.full, after.full)),
            kept=jnp.where(ok, front, c.kept) if of.caching.persists else c.kept, valid=valid,
            refreshed=jnp.where(ok, c.round, c.refreshed) if self.wide else c.refreshed,
            record=None if noted is None else jax.tree.map(write, c.record, noted))
        if of.verify.assists:
            again = again.replace(assistant=of.verify.settle(c.assistant, entries, c.start, start))
        if expected is not None and c.expected is not None:
            new = jnp.where(_per_row(works, expected), expected, c.expected)
            again = again.replace(expected=jnp.where(_per_row(moved, expected), 0, new))
        there = look(s, again, W, view.eos)
        again = again.replace(
            opened=jnp.where(moved, there.masked.sum(1, dtype=jnp.int32), c.opened),
            memory=self._learned(c.memory, before, answer, after.replace(start=start, step=again.step), works),
            drafts=self._drafted(c, there, after, answer, works, moved))
        slots = jnp.full((B, window.width), -1, jnp.int32).at[:, :n].set(jnp.where(writes, positions, -1))
        return Decision(
            tokens=jnp.where((broken < 0)[:, None], broken[:, None], cut(again.tokens, s.length, W)),
            count=jnp.where(broken < 0, 1, emit).astype(jnp.int32), slots=slots,
            source=jnp.zeros((B, W), jnp.int32), algo=again,
            drafted=jnp.where(works, K - 1, 0).astype(jnp.int32),
            accepted=jnp.where(works, path.sum(1, dtype=jnp.int32) - 1, 0),
            record=None if noted is None else jax.tree.map(lambda x: cut(x, s.length, W), again.record), idle=~turn)

    def _writes(self, view: View, c: Canvas, positions: Array, live: Array, front: Array) -> tuple[Array, Array]:
        """Returns the nodes whose entries are written, `bool[B, n]`, and the cache slots that have an entry afterwards,
        `bool[B, S]`."""
        if not self.inner.traits.caches:
            return jnp.zeros(positions.shape, bool), c.valid
        S = c.valid.shape[1]
        held = take(c.valid, jnp.minimum(positions, S - 1)) & (not self.wide)
        writes = live & (positions < S) & self.inner.caching.writes(view, positions, front, held, c.memory["caching"])
        old = jnp.where(live.any(1)[:, None], False, c.valid) if self.wide else c.valid
        return writes, _scatter(old, positions, writes, writes)

    def _learned(self, memory: Any, before: View, seen: Seen, after: View, works: Array) -> Any:
        def one(rule: Any, old: Any) -> Any:
            new = rule.learn(before, seen, after, old)
            return jax.tree.map(lambda a, b: jnp.where(_per_row(works, a), a, b), new, old)

        return {name: tuple(map(one, self.inner.stops, old)) if name == "stops" else one(getattr(self.inner, name), old)
                for name, old in memory.items()}

    def _drafted(self, c: Canvas, there: View, after: View, seen: Seen, works: Array, moved: Array) -> Any:
        """Returns the next round's drafts: further steps that reuse this round's predictions. A new window has none."""
        if c.drafts is None:
            return None
        wanted = self.inner.verify.taken[1:]
        ahead = [after]
        for _ in range(1 + max(i for taken in wanted for i in taken)):
            ahead.append(self.inner.advance(ahead[-1], seen, c.memory))

        def draft(taken: tuple[int, ...]) -> tuple[Array, Array]:
            tokens, open = after.tokens, after.open
            for was, now in ((ahead[i], ahead[i + 1]) for i in taken):
                new = (was.open != now.open) | (was.tokens != now.tokens)
                tokens, open = jnp.where(new, now.tokens, tokens), jnp.where(new, now.open, open)
            return tokens, open

        new = [jnp.stack(x, 1) for x in zip(*map(draft, wanted), strict=True)]
        pick = lambda new, none, old: jnp.where(_per_row(moved, old), none, jnp.where(_per_row(works, old), new, old))
        return tuple(map(pick, new, self.inner.no_drafts(there), c.drafts))

    def _predicting(self, view: View, nodes: Nodes, size: int) -> Array:
        """Returns the node whose logits predict each position of the window, `i32[B, W]`; -1: none."""
        number = jnp.broadcast_to(jnp.arange(nodes.positions.shape[1], dtype=jnp.int32), nodes.positions.shape)
        index = jnp.full((view.start.shape[0], size), -1, jnp.int32)
        for which in (nodes.live & ~nodes.own, nodes.live & nodes.own):     # the window's own copy counts
            index = _scatter(index, nodes.positions, which, number)
        at = view.positions - int(self.inner.adapter.shift)
        return jnp.where(at >= 0, take(index, jnp.maximum(at, 0)), -1)

    def _noted(self, view: View, after: View, drafts: View, results: View, seen: Seen, path: Array, c: Canvas,
               note: Any) -> tuple[View, Any]:
        """Returns `after` with the round and the log-probability of each decision, and the record, step by step along
        the accepted drafts."""
        when, confidence, kept = view.when, view.confidence, None
        if note is not None:
            kept = jax.tree.map(lambda x: cut(x, c.start, view.tokens.shape[1]), c.record)
        for k in range(drafts.tokens.shape[1]):
            was, now = drafts.open[:, k], results.open[:, k]
            new = ~now & (was | (drafts.tokens[:, k] != results.tokens[:, k])) & path[:, k, None]
            when = jnp.where(now & path[:, k, None], -1, jnp.where(new, drafts.round[:, k, None], when))
            confidence = jnp.where(new, seen.model.log_prob[:, k], confidence)
            if note is not None:
                kept = jax.tree.map(lambda x, old, k=k, new=new: jnp.where(
                    new.reshape(*new.shape, *[1] * (old.ndim - 2)), x[:, k], old), note, kept)
        return after.replace(when=when, confidence=confidence), kept


def _scatter(x: Array, positions: Array, where: Array, new: Array) -> Array:
    """Returns `x` with `x[b, positions[b, i]] = new[b, i]` where `where[b, i]` is True."""
    at = jnp.where(where, positions, x.shape[1])
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(x, at, new.astype(x.dtype))


def _packed(nodes: Nodes, size: int) -> Nodes:
    """Returns the first `size` live nodes of each row, in order, filled up with dead ones."""
    first = jnp.argsort(~nodes.live, axis=1, stable=True)[:, :size]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, first, 1), nodes)


def _per_row(rows: Array, like: Array) -> Array:
    return rows.reshape(-1, *[1] * (like.ndim - 1))
