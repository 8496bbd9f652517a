"""The published loops of approximate caches, written out in NumPy; each reads like its authors' code."""

import functools
import itertools

import numpy as np

from decodax.core import keys
from decodax.core.keys import Purpose
from tests.algorithms.diffusion.network import Network
from tests.laws.cases import MASK

NEW, BLOCK = 16, 8


@functools.cache
def net():
    return Network()


def quota(masks, steps):
    return [masks // steps + (i < masks % steps) for i in range(steps)]


def unmask(x, lp, where, among, count):
    """The `count` surest masks of `among` get their likeliest tokens; `lp` are the log-probabilities at `where`."""
    confidence = np.full(len(x), -np.inf)
    confidence[where] = lp.max(-1)
    confidence[(x != MASK) | ~among] = -np.inf
    chosen = np.argsort(-confidence, kind="stable")[:count]
    x[chosen] = lp[[np.flatnonzero(where == c)[0] for c in chosen]].argmax(-1)
    return chosen


def blocks(prompt):
    x = np.array(prompt + [MASK] * NEW)
    place = np.arange(len(x))
    return x, place, [(place >= lo) & (place < lo + BLOCK) for lo in range(len(prompt), len(x), BLOCK)]


def dkv_decode(prompt, steps, reload, delay=1):
    """llada_dkv_cache_decode.py: all that was decided by the end of the step before last comes from the cache."""
    x, place, among = blocks(prompt)
    computed = 0
    for block in among:
        history, cache = [], net().empty(len(x))
        for i, count in enumerate(quota(BLOCK, steps)):
            where = place if i % reload == 0 or i <= delay else np.flatnonzero(~history[i - delay - 1])
            unmask(x, net().forward(x[where], where, cache), where, block, count)
            history.append(x != MASK)
            computed += len(where)
    return x[len(prompt):].tolist(), computed


def vicinity(prompt, threshold, before, after, warmup):
    """dInfer's VicinityCacheIteration, with its threshold decoder: some text-wide steps first, one that fills the
    cache, one more at each later block; all others compute the block and what lies around it."""
    x, place, among = blocks(prompt)
    cache, step = None, 0
    for block in among:
        first = True
        while (x[block] == MASK).any():
            full = step < warmup or cache is None or first
            near = place[(place >= place[block][0] - before) & (place <= place[block][-1] + after)]
            where = place if full else near
            if step >= warmup and full:
                cache = net().empty(len(x))
            used = net().empty(len(x)) if cache is None else cache
            lp = net().forward(x[where], where, used)
            open = (x == MASK) & block
            best = np.full(len(x), -np.inf)
            best[where] = lp.max(-1)
            sure = int((best[open] >= np.log(threshold)).sum())
            unmask(x, lp, where, block, max(sure, 1))
            step, first = step + 1, False
    return x[len(prompt):].tolist(), step


def freecache(prompt, steps):
    """FreeCache's block loop: one forward over the text, then over the block and what follows it; what the block's last
    forward computed stays."""
    x, place, among = blocks(prompt)
    cache, first = net().empty(len(x)), True
    for block in among:
        for count in quota(BLOCK, steps):
            where = place if first else place[place >= place[block][0]]
            unmask(x, net().forward(x[where], where, cache), where, block, count)
            first = False
    return x[len(prompt):].tolist()


def recap(prompt, steps, every, lead):
    """The maskgit loop of ReCAP: full steps choose the targets of the steps up to the next full one, in their order."""
    x, place, _ = blocks(prompt)
    left = [int(NEW * (1 - (i / steps) ** 2.5)) for i in range(steps + 1)]
    counts = [max(a - b, 1) for a, b in itertools.pairwise(left)]
    full = [i < lead or (i - lead) % every == 0 for i in range(steps)]
    cache, i = net().empty(len(x)), 0
    while i < steps and (x == MASK).any():
        group = [counts[i]]
        while i + len(group) < steps and not full[i + len(group)]:
            group.append(counts[i + len(group)])
        lp = net().forward(x, place, cache)
        order = np.argsort(np.where(x == MASK, -lp.max(-1), np.inf), kind="stable")
        targets = order[:min(sum(group), (x == MASK).sum())]
        where = np.sort(targets)
        for count in group:
            now, targets = targets[:count], targets[count:]
            x[now] = lp.argmax(-1)[now]
            lp = np.full(lp.shape, -np.inf)
            if len(targets):
                lp[where] = net().forward(x[where], where, cache)
            i += 1
    return x[len(prompt):].tolist()


def dkv_greedy(prompt, row, steps, reload, window):
    """llada_dkv_cache_greedy.py: the order is drawn for the block; a step computes what it decides, what the last one
    decided, and for each of the former the nearest masks, to the left and to the right by turns."""
    x, place, among = blocks(prompt)
    address = keys.row_keys(*(np.array([v], np.uint32) for v in (7, row, 0)))
    draws = np.asarray(keys.uniforms(address, place[None].astype(np.int32), Purpose.ORDER))[0, :, 0]
    for block in among:
        order = np.flatnonzero(block)[np.argsort(-draws[block], kind="stable")]
        ends = np.cumsum([0, *quota(BLOCK, steps)])
        cache, previous = net().empty(len(x)), order[:0]
        for i in range(steps):
            chosen = order[ends[i]:ends[i + 1]]
            taken = np.isin(place, [*chosen, *previous])
            for c in chosen:
                found, left, right, turn = 0, c - 1, c + 1, True
                while found < window and (left >= 0 or right < len(x)):
                    at = left if turn else right
                    if 0 <= at < len(x) and not taken[at] and x[at] == MASK:
                        taken[at], found = True, found + 1
                    left, right, turn = left - turn, right + (not turn), not turn
            where = place if i % reload == 0 else np.flatnonzero(taken)
            lp = net().forward(x[where], where, cache)
            x[chosen] = lp[np.searchsorted(where, chosen)].argmax(-1)
            previous = chosen
    return x[len(prompt):].tolist()


def dllm_cache(prompt, steps, of_prompt, of_response, ratio):
    """cache_hook_LLaDA.py's `cache_hook_feature` in LLaDA's loop."""
    x, place, among = blocks(prompt)
    n, old = net(), net().empty(len(x))
    added, more = ([np.zeros((len(x), net().c.width)) for _ in n.layers] for _ in range(2))
    step = 0
    for block in among:
        for count in quota(BLOCK, steps):
            head, response = place < len(prompt), place >= len(prompt)
            head = head & (step % of_prompt == 0)
            stream = n.embed(x)
            for i in n.layers:
                q, k, v = n.project(i, stream, place)
                chosen = head | response
                if i == 0:          # the first layer, whose output the others measure, is computed whole
                    chosen = place >= 0
                elif step % of_response:
                    a, b = v[response].reshape(response.sum(), -1), old[1][i][response].reshape(response.sum(), -1)
                    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
                    least = np.argsort(cosine, kind="stable")[:int(response.sum() * ratio)]
                    chosen = head | np.isin(place, np.flatnonzero(response)[least])
                renewed = chosen | head | response
                old[0][i][chosen], old[1][i][renewed] = k[chosen], v[renewed]
                added[i][chosen] = n.attend(i, q[chosen], old[0][i], old[1][i])[0]
                stream = stream + added[i]
                more[i][chosen] = n.mlp(i, stream[chosen])
                stream = stream + more[i]
            unmask(x, n.log_probs(stream), place, block, count)
            step += 1
    return x[len(prompt):].tolist()


def fast_dllm_dream(prompt, threshold, dual):
    """Fast-dLLM's generation_utils_block.py for Dream, whose logits point to the next position."""
    x, place, among = blocks(prompt)
    forwards = 0
    shifted = lambda lp: np.concatenate([lp[:1], lp[:-1]])
    for block in among:
        cache = net().empty(len(x))
        lp, first = shifted(net().forward(x, place, cache)), place[block][0]
        x[first], forwards = lp[first].argmax(), forwards + 1
        where = place[block] if dual else place[place >= first]
        while (x[block] == MASK).any():
            lp = shifted(net().forward(x[where], where, cache))[:BLOCK]
            open = x[block] == MASK
            sure = int((lp.max(-1)[open] >= np.log(threshold)).sum())
            unmask(x, lp, place[block], block, max(sure, 1))
            forwards += 1
    return x[len(prompt):].tolist(), forwards


def fast_dllm_2(prompt, threshold, sub, inside):
    """Fast-dLLM v2's batch_sample with its small blocks and `use_block_cache`: blocks are counted from the beginning,
    the last one is whole, and the forward over what stands before a block gives its first token."""
    total = -(-(len(prompt) + NEW) // BLOCK) * BLOCK
    x, place = np.array(prompt + [MASK] * (total - len(prompt))), np.arange(total)
    sees = place[None] // BLOCK <= place[:, None] // BLOCK
    for lo in range(len(prompt) // BLOCK * BLOCK, total, BLOCK):
        hi, first = lo + BLOCK, True
        cache = net().empty(hi)
        if lo:
            lp = net().forward(x[:lo], place[:lo], cache, sees[:lo, :hi])
            x[lo] = lp[-1].argmax() if x[lo] == MASK else x[lo]
        for at in range(lo, hi, sub):
            among = (place >= at) & (place < at + sub)
            while (x[among] == MASK).any():
                where = place[lo:hi] if first or x[at] == MASK or not inside else place[at:at + sub]
                lp = net().forward(x[where], where, cache, sees[where, :hi])
                lp = np.concatenate([lp[:1], lp[:-1]])          # logits point to the next position
                open = among[where] & (x[where] == MASK)
                unmask(x, lp, where, among, max(int((lp.max(-1)[open] > np.log(threshold)).sum()), 1))
                first = False
    return x[len(prompt):len(prompt) + NEW].tolist()


def flashdlm(prompt, top, window):
    """FlashDLM's guided loop with its sliding window; the guide is the same network, read causally. Behind the window
    lies nothing, but for the first forward."""
    x, place, _ = blocks(prompt)
    cache, start, steps = net().empty(len(x)), len(prompt), 0
    while start < len(x):
        low, high = max(start - 1 - window, 0), min(start - 1 + window, len(x))
        where = place if steps == 0 else place[low:high]
        seen = np.ones((len(where), len(x)), bool) if steps == 0 else np.tile(place < high, (len(where), 1))
        lp = net().forward(x[where], where, cache, seen)
        drafts = lp[(where >= start) & (where < high)].argmax(-1)
        text = np.concatenate([x[:start], drafts])
        guide = net().forward(text, place[:high], seen=np.tri(high, dtype=bool))[start - 1:-1]
        agreed = [(g > g[token]).sum() < top for g, token in zip(guide, drafts, strict=True)]
        count = max(agreed.index(False) if False in agreed else len(agreed), 1)
        x[start:start + count] = drafts[:count]
        start, steps = start + count, steps + 1
    return x[len(prompt):].tolist(), steps


def elastic(prompt, threshold, window, gamma):
    """Elastic-Cache's generate_with_elastic_cache, and its attention."""
    x, place, _ = blocks(prompt)
    n, size = net(), len(x)
    keys, values = n.empty(size)
    streams = [np.zeros((size, n.c.width)) for _ in n.layers]
    queries = [np.zeros((size, n.c.heads, n.c.head_dim)) for _ in n.layers]
    tracked, fresh, steps, renewed = None, None, 0, 0
    while (x == MASK).any():
        masked = np.flatnonzero(x == MASK)
        asked = masked[:window]
        nodes = place if tracked is None else np.unique([*tracked, *fresh, *asked])
        reset = -1 if tracked is None else len(n.layers)
        stream, track = n.embed(x[nodes]), []
        for i in n.layers:
            if i > reset:
                streams[i][:] = stream
            else:
                streams[i][nodes] = stream
            where = place if i >= reset else nodes
            stream = streams[i][where]
            q, k, v = n.project(i, stream, where)
            if i < reset:
                then = n.attend(i, queries[i][tracked], keys[i], values[i])[1]
            keys[i][where], values[i][where], queries[i][where] = k, v, q
            added, weights = n.attend(i, q, keys[i], values[i])
            if i < reset:
                now = weights[:, np.searchsorted(where, tracked)]
                alike = (now * then).sum(0) / np.linalg.norm(now, axis=0) / np.linalg.norm(then, axis=0)
                if alike.mean() < gamma:
                    reset = i + 1
            attended = weights[:, np.searchsorted(where, asked)].sum((0, 1))
            attended[masked] = -1
            track.append(attended.argmax())
            stream = stream + added
            stream = stream + n.mlp(i, stream)
        renewed += 0 if tracked is None else len(n.layers) - reset
        lp = n.log_probs(stream)[np.searchsorted(where, asked)]
        tracked = np.unique(track)
        sure = lp.max(-1) >= min(np.log(threshold), lp.max())
        fresh = asked[sure]
        x[fresh] = lp.argmax(-1)[sure]
        steps += 1
    return x[len(prompt):].tolist(), steps, renewed
