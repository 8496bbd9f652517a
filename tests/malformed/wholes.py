"""Whole numbers and switches of the call: floats, truths and texts in their place, none or too many, endless ones."""

import decimal
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.engine.request import Request
from tests.malformed.case import FIXED, IDS, NEW, Case, Thing, World, rows

WHOLE = {"max_new_tokens": 0, "max_length": 5, "min_new_tokens": 0, "seed": 0, "request_ids": 0, "num_samples": 1,
         "logprobs": 0, "chunk": 1, "batch_size": 1, "min_tokens_to_keep": 1, "every": 1}
ONE = ("num_samples", "logprobs", "chunk", "batch_size", "min_tokens_to_keep", "every")
MOST = {"seed": 2 ** 64 - 1, "request_ids": 2 ** 32 - 1, "logprobs": 375, "max_new_tokens": 10 ** 6,
        "max_length": 10 ** 6, "num_samples": 10 ** 4}


def wholes(rng: random.Random) -> Case:
    if rng.random() < 0.2:
        return switches(rng)
    name = rng.choice(list(WHOLE))
    low, high = WHOLE[name], MOST.get(name, 2 ** 31 - 1)
    x = rng.choice([low, low + 1, low + 7])
    pool: list[Any] = [
        x, np.int32(x), np.array(x), low - 1, -5, 2.5, 3.9, 3.0, True, "3", b"3", "", math.nan, math.inf, 1j, Thing(),
        {}, {x}, {"a": 1}, [x, x], (x, x), [x], [x] * 3, [x, 2.5], [x, low - 1], [x, "a"], [x, None], [x, True],
        [[x], [x]], np.array([x, x]), np.array([x + 0.5, x]), np.array([[x, x]]), iter([x, x]), itertools.count(),
        10 ** 12, 2 ** 63, 2 ** 64, 10 ** 30, decimal.Decimal(x), lambda: x, [], [math.nan] * 2, jnp.array([x, x]),
        [[]]]
    value = rng.choice(pool)
    one = lambda v, low=low: isinstance(v, (int, np.integer)) and not isinstance(v, bool) and low <= v <= high
    each: Any = value
    if isinstance(value, (np.ndarray, jax.Array)):
        each = value.tolist()
    elif isinstance(value, Iterator):
        each = [x, x] if name not in ONE and not isinstance(value, itertools.count) else Thing()
    several = isinstance(each, (list, tuple)) and name not in ONE
    least = [len(row) for row in IDS] if name == "max_length" else [low] * 2
    good = len(each) == 2 and all(v is None or one(v, n) for v, n in zip(each, least, strict=True)) if several \
        else one(each)
    what = f"{name}={value!r:.60}"
    if name == "every":
        if good:
            return wholes(rng)
        return Case(what, lambda w: dx.watch(w.filling, IDS[0], every=value), (name,))
    given = {"temperature": 1.0, "top_k": 3} if name == "min_tokens_to_keep" else {}
    if not good:
        return Case(what, lambda w: dx.generate(w.lm, IDS, **{name: value}, **given), (name,))
    wanted = list(each) if several else [each] * 2

    def read(w: World, request: Request) -> bool:
        new = [NEW_DEFAULT if v is None else v for v in wanted]
        match name:
            case "seed":
                return [(int(a) << 32) | int(b) for a, b in request.seeds] == [v or 0 for v in wanted]
            case "request_ids":
                return request.request_ids.tolist() == [v or 0 for v in wanted]
            case "max_new_tokens":
                return request.max_new.tolist() == new
            case "max_length":
                totals = [len(row) + NEW_DEFAULT if v is None else v for row, v in zip(IDS, wanted, strict=True)]
                return [len(row) + int(n) for row, n in zip(IDS, request.max_new, strict=True)] == totals
            case "min_new_tokens":
                return request.min_new.tolist() == [v or 0 for v in wanted]
            case "num_samples":
                return request.samples == each and request.policy.eos.shape[0] == 2 * each
            case "min_tokens_to_keep":
                return request.policy.transforms[1].min_keep == each
            case "batch_size":
                return request.batch_size == min(each, 2)
        return getattr(request, name) == each

    if name in ("max_new_tokens", "batch_size") and all(v is not None and v <= 8 for v in wanted):
        options = {**FIXED, name: value}
        length = wanted if name == "max_new_tokens" else [NEW] * 2
        return Case(what, lambda w: dx.generate(w.lm, IDS, **options), (name,),
                    lambda w, out: out.lengths.tolist() == length)
    return Case(what, lambda w: Request.read(w.lm, IDS, **{name: value}, **given), (name,), read)


NEW_DEFAULT = 64


def switches(rng: random.Random) -> Case:
    name = rng.choice(["include_stop", "skip_special_tokens", "progress", "ends", "do_sample"])
    value = rng.choice([True, False, np.bool_(True), 2, "yes", "", None, [True], [True] * 3, {}, Thing(), 1.5,
                        math.nan])
    what = f"{name}={value!r:.40}"
    good = isinstance(value, (bool, np.bool_)) or (name == "do_sample" and value is None)
    if name == "ends":
        if good:
            return switches(rng)
        return Case(what, lambda w: dx.infill(w.filling, [[40], 3], ends=value), (name,))
    if good and name != "progress":
        field = (lambda w, r: getattr(r, name) == bool(value)) if name != "do_sample" else \
            lambda w, r: r.policy.greedy.tolist() == [not value] * 2
        return Case(what, lambda w: Request.read(w.lm, IDS, **{name: value}), (name,), field)
    return Case(what, lambda w: dx.generate(w.lm, IDS, **{name: value}, **FIXED), (name,),
                (lambda w, out: rows(out) == w.reference) if good else None)
