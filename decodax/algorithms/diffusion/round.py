"""One round of masked diffusion: a wide forward over the whole text, or a narrow one beside the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.canvas import Canvas, cut, look, paste, survey
from decodax.algorithms.diffusion.rules.stops import EndOfText
from decodax.algorithms.diffusion.stats import statistics
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.struct import Struct, struct
from decodax.constraints.canvas import OUTSIDE, OnCanvas, Region, accepted
from decodax.core.around import Around
from decodax.core.keys import Purpose
from decodax.core.record import record
from decodax.core.state import State
from decodax.core.types import INVALID, Algorithm, Decision, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.base import Distribution


@struct
class _Text(Struct):
    """What the policy's transforms read of a row: a stand-in for the state whose text is the canvas."""

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array
    policy: Any


@dataclasses.dataclass(frozen=True)
class Round(Around):
    """One kind of round of the sampler `of`. A `wide` round reads the whole text and writes the cache if there is one.
    A narrow one scores `size` nodes a row, or as many as the caching rule gives if that is None. `phase` is set for
    rules with phases."""

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
        """`K`, canvases a row; 1 in the wide rounds of a cache, which begin a region, where there are no drafts yet."""
        return 1 if self.wide and self.inner.caching.narrow else len(self.inner.verify.taken)

    def _turn(self, s: State) -> Array:
        """`bool[B]`: rows that take part."""
        if not self.inner.variants:
            return s.running
        mine = self.inner.needs_refresh(s) == self.wide if self.phase is None else self.inner.phase(s) == self.phase
        return s.running & mine

    def through(self, model: Any) -> Any:
        """The model as these rounds run it."""
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
            if of.caches:       # canvases share the row's cache, so they stand in one window
                mask = _side_by_side(mask, K)
            else:               # and are rows of their own where they share nothing
                split = lambda x: x.reshape(s.batch * K, -1)
                tokens, positions, live = split(tokens), split(positions), split(live)
                mask = jnp.repeat(mask, K, 0)
        hint = None if self.phase is None else of.caching.hint(look(s, c, of.windows.width), positions, self.phase)
        return Window(tokens=tokens, positions=positions, mask=mask, live=live, cached=cached,
                      hints=() if hint is None else (hint,)), c

    def _text(self, s: State, c: Canvas) -> Canvas:
        """The canvas as the model reads it. Behind an early end it holds what the stop rule fills in."""
        if not any(stop.filled for stop in self.inner.stops):
            return c
        N = c.tokens.shape[1]
        end = jnp.maximum(c.end, jnp.minimum(s.max_length, N - self.inner.windows.width))
        last = take(c.tokens, jnp.maximum(c.end - 1, 0)[:, None])
        return c.replace(tokens=jnp.where(jnp.arange(N) >= c.end[:, None], last, c.tokens), end=end)

    def _nodes(self, s: State, c: Canvas) -> Nodes:
        """The nodes that this round scores."""
        of, attention, N, W = self.inner, self.inner.adapter.attention, c.tokens.shape[1], self.inner.windows.width
        # before the first round the entry of a prefilled prompt's last token is missing
        left = int(of.adapter.shift or of.prefills)
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
            # a final token has one node, unless the region sees it through a copy
            twice = ~nodes.own & (nodes.positions >= c.start[:, None] - left) & (not attention.joined)
            nodes = nodes.replace(own=own, live=nodes.live & ~twice)
        end = attention.reach(c.start, W, self._end(s, c))
        nodes = Nodes(positions=jnp.clip(nodes.positions, 0, N - 1), own=nodes.own,
                      live=nodes.live & (nodes.positions < end[:, None]))
        nodes = nodes if self.wide or self.size is None else _packed(nodes, self.size)
        return nodes.replace(prompt=s.prompt_length)

    def _end(self, s: State, c: Canvas) -> Array:
        """`i32[B]`: the end of the positions that are attended to."""
        return self.inner.whole(s) if self.inner.caching.beyond else c.end

    def live_nodes(self, s: State) -> Array:
        """`i32[B]`: how many nodes of a narrow round are live."""
        return self._nodes(s, self._text(s, s.algo)).live.sum(1, dtype=jnp.int32)

    def _branch_tokens(self, drafts: Array, positions: Array, tokens: Array, c: Canvas) -> Array:
        """`i32[B, K * n]`: the window's tokens once for each draft (`i32[B, K, W]`), which replaces the region."""
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
        seen, note, entries = self._see(params, dist, s, c, drafts, node, out)
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

        # what is final, what is emitted, and where the region goes
        front = jnp.maximum(c.final, c.start)       # all before it has final tokens, which this forward saw
        # what a stop rule has ended is not remasked any more: the token that ends it might go
        busy = of.remask.busy(before, after, c.memory["remask"]) & (after.end == view.end)
        count = of.windows.finished(after, c.memory["windows"])
        # a region that overhangs the budget is done when what lies before it is decided
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
        """`bool[B, n]` which nodes' entries are written, and `bool[B, S]` which cache slots hold an entry afterwards.
        """
        if not self.inner.caches:
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
        """The next round's drafts: further steps that reuse this round's answers. A region that has just begun has
        none."""
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
        """`i32[B, W]`: the window node whose logits predict each position of the region, -1 where none does."""
        number = jnp.broadcast_to(jnp.arange(nodes.positions.shape[1], dtype=jnp.int32), nodes.positions.shape)
        index = jnp.full((view.start.shape[0], size), -1, jnp.int32)
        for which in (nodes.live & ~nodes.own, nodes.live & nodes.own):     # the region's own copy counts
            index = _scatter(index, nodes.positions, which, number)
        at = view.positions - int(self.inner.adapter.shift)
        return jnp.where(at >= 0, take(index, jnp.maximum(at, 0)), -1)

    def _see(self, params: Params, dist: Any, s: State, c: Canvas, drafts: View, node: Array,
             out: Out) -> tuple[Seen, Any, Any]:
        """Step 2: the model's answers on the regions `[B * K, W]`, the record of log-probabilities (or None), and a
        second model's entries (or None)."""
        of = self.inner
        B, K, W = drafts.tokens.shape
        hidden = out.hidden.reshape(B, -1, out.hidden.shape[-1])
        first = hidden.shape[1] // K * jnp.arange(K, dtype=jnp.int32)
        nodes = (jnp.maximum(node, 0)[:, None] + first[:, None]).reshape(B, K * W)
        merge = lambda x: x.reshape(B, K * W)
        split = lambda tree: jax.tree.map(lambda x: x.reshape(B * K, W, *x.shape[2:]), tree)
        own = split(of.adapter.clean(out.head)(take(hidden, nodes)))
        flat = jax.tree.map(lambda x: x.reshape(B * K, *x.shape[2:]), drafts)
        logits = of.shaper(flat, own, c.memory["shaper"]).reshape(B, K * W, -1)

        # for the transforms the text is what is decided: outside the region, and inside it draft by draft
        N = c.tokens.shape[1]
        place = jnp.arange(N, dtype=jnp.int32)
        unknown = c.open | (place >= c.end[:, None])
        region = (place >= c.start[:, None]) & (place < c.start[:, None] + W)
        text = _Text(tokens=jnp.where(unknown | region, -1, c.tokens), length=jnp.full(B, N, jnp.int32),
                     prompt_length=s.prompt_length, key=s.key, policy=s.policy)
        known = merge(~drafts.open & (drafts.positions < drafts.end[..., None]))
        window = Window(tokens=merge(drafts.tokens), positions=merge(drafts.positions), live=known,
                        mask=_side_by_side(jnp.ones((1, W, W), bool), K))

        def over(logits: Array) -> Distribution:
            return dist.policy.over_logits(text, window, logits).on_canvas(known, window.positions)

        here = over(logits)
        agreed = entries = None
        if of.verify.assists:
            last = take(c.tokens, jnp.maximum(c.start - 1, 0)[:, None])[:, 0]
            token, agreed, entries = of.verify.judge(params.draft, c.assistant, flat, last, logits,
                                                     lambda x: over(x).processed())
        else:
            draws = [here.draw(jnp.broadcast_to(k * W + jnp.arange(W, dtype=jnp.int32), (B, W)), Purpose.CANVAS,
                               salt=c.round + len(of.verify.taken[k])) for k in range(K)]
            token = jnp.concatenate(draws, 1)
        link = next((t for t in dist.policy.transforms if isinstance(t, OnCanvas)), None)
        if link is not None:
            token = self._held(link, dist, s, c, here, flat, token, node, first.shape[0])
        rules = (of.windows, of.score, of.unmask, of.remask, *of.stops)
        second = None
        if any(rule.of == "policy" for rule in rules):
            second = statistics(here.warm.processed(), token)
        reached = jnp.broadcast_to((node >= 0)[:, None], (B, K, W))
        seen = split(Seen(token=token, reached=merge(reached), model=statistics(logits, token), policy=second,
                          agreed=agreed))
        if reads := max(rule.reads for rule in (of.shaper, *rules)):
            top, ids = top_k(own, reads)
            seen = seen.replace(likeliest=(ids, top - jax.nn.logsumexp(own, -1, keepdims=True)))
        note = None if c.record is None else record(logits, here.log_probs(), token, c.record.count)
        note = note if note is None else jax.tree.map(lambda x: x.reshape(B, K, W, *x.shape[2:]), note)
        return seen, note, entries

    def _held(self, link: OnCanvas, dist: Any, s: State, c: Canvas, here: Distribution, flat: View, token: Array,
              node: Array, count: int) -> Array:
        """`i32[B, K * W]`: tokens of one text of the language that rows are held to, canvas by canvas."""
        if self.inner.verify.assists:
            raise ValueError("constraints: a second model decides what is unmasked; takes a sampler without one")
        if any(not isinstance(stop, EndOfText) for stop in self.inner.stops):
            raise ValueError("constraints: a rule ends texts early, which may not be whole then; takes a sampler "
                             "without such a rule")
        (B, width), W = token.shape, flat.tokens.shape[1]
        split = lambda x: x.reshape(B * count, W, *x.shape[2:])
        each = lambda x: jnp.repeat(x, count, 0)
        front, behind = map(split, here.stages())
        # what a truncation has left out is taken only where the language wants it; of greedy rows all count alike
        cold = each(dist.policy.greedy)
        soft = jnp.where(behind == -jnp.inf, jax.nn.log_softmax(front) - OUTSIDE, jax.nn.log_softmax(behind))
        weights = jnp.where(cold[:, None, None], jax.nn.log_softmax(front), soft)
        weights = jnp.where(front == -jnp.inf, -jnp.inf, weights)
        # positions that this round has not looked at may hold anything that is not banned
        reached = each(node >= 0)[..., None]
        weights = jnp.where(reached, weights, jnp.where(front == -jnp.inf, -jnp.inf, 0.0))
        place = jnp.arange(c.tokens.shape[1], dtype=jnp.int32)
        region = Region(tokens=each(c.tokens), known=each(~c.open & (place < c.end[:, None])),
                        begin=each(s.prompt_length), end=flat.end, start=flat.start, given=flat.tokens,
                        open=flat.masked)
        link = link.replace(start=each(link.start), end=each(link.end))
        new = accepted(link, dist.policy.tables, each(dist.policy.eos), region, weights, cold,
                       flat.addresses(Purpose.CANVAS), split(token))
        # broken logits stay visible
        return jnp.where(split(token) == INVALID, INVALID, new).reshape(B, width)

    def _noted(self, view: View, after: View, drafts: View, results: View, seen: Seen, path: Array, c: Canvas,
               note: Any) -> tuple[View, Any]:
        """When each token was decided and with what log-probability, step by step along the drafts that were true."""
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
    """`x[b, positions[b, i]] = new[b, i]` where `where[b, i]`."""
    at = jnp.where(where, positions, x.shape[1])
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(x, at, new.astype(x.dtype))


def _packed(nodes: Nodes, size: int) -> Nodes:
    """The first `size` live nodes of each row, in order, filled up with dead ones."""
    first = jnp.argsort(~nodes.live, axis=1, stable=True)[:, :size]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, first, 1), nodes)


def _side_by_side(mask: Array, count: int) -> Array:
    """`bool[B, count * n, count * n]`: several canvases in one window, each attending to itself by `bool[B, n, n]` and
    not to the others."""
    apart = jnp.eye(count, dtype=bool)[:, None, :, None]
    return (apart & mask[:, None, :, None, :]).reshape(mask.shape[0], count * mask.shape[1], -1)


def _per_row(rows: Array, like: Array) -> Array:
    return rows.reshape(-1, *[1] * (like.ndim - 1))
