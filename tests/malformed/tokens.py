"""Token lists, sequences and biases: ids that are none, of the wrong depth, for the wrong number of rows."""

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.engine.request import Request
from tests.malformed.case import IDS, NEW, Case, Thing, World, loop

LISTS = {"suppress_tokens": False, "begin_suppress_tokens": False, "allowed_token_ids": True, "eos_token_id": True,
         "forced_eos_token_id": True}
"""Arguments that take token ids, and whether they look at the vocabulary's size."""


def tokens(rng: random.Random) -> Case:
    wide = rng.randrange(375, 10 ** 6)
    if rng.random() < 0.5:
        name = rng.choice(list(LISTS))
        pool = [(5, {5}), ([5, 6], {5, 6}), ((5, 6), {5, 6}), ({5}, {5}), (np.array([5, 6]), {5, 6}),
                (range(3), {0, 1, 2}),
                ([[5], [6]], {5, 6}), ([[5], None], {5}), (jnp.array([[5], [6]]), {5, 6}), (np.int64(5), {5}),
                *((bad, None) for bad in ([5.0], [5.5], 5.5, True, [True], "5", ["5"], b"5", [-5], -5, [[5]], [[5]] * 3,
                                          [[[5]], [[6]]], [2 ** 40], [10 ** 30], Thing(), [Thing()], math.nan,
                                          iter([5]), [5, [6]], [5, None, 6], np.array([5.0]), {"a": 5}, [{}],
                                          range(10 ** 12), loop(), 1j, [[5], [math.nan]])),
                ([wide], None if LISTS[name] else {wide})]
        value, wanted = rng.choice(pool)
    else:
        name = rng.choice(["bad_words_ids", "dry_sequence_breakers", "sequence_bias", "logit_bias"])
        words = [([[5]], {5}), ([[5, 6], [7]], {5, 6, 7}), ([[[5]], [[6]]], {5, 6}), ([[[5]], None], {5}),
                 (((5,),), {5}),
                 *((bad, None) for bad in (5, [5], [[]], [[5], []], "x", ["x"], [["x"]], [[5.5]], [[True]], [[wide]],
                                           [[-3]], [[[5]]] * 3, Thing(), math.nan, [[[[5]]]], {"a": [5]}, loop(),
                                           b"x"))]
        biases = [({5: 1.0}, {5}), ({5: 1, 6: -2.5}, {5, 6}), ([[[5], 1.0]], {5}), ([{5: 1.0}, {6: 2.0}], {5, 6}),
                  ({"5": 1.0}, {5}), ({np.int64(5): np.float32(1)}, {5}),
                  *((bad, None) for bad in ({5: "x"}, {5: math.nan}, {5: math.inf}, {"x": 1.0}, {-1: 1.0}, {wide: 1.0},
                                            [5], [[5]], "x", 5, {(): 1.0}, {5.5: 1.0}, {True: 1.0}, {5: None}, {5: 1j},
                                            [{5: 1.0}] * 3, Thing(), {5: True}, [[5, 1.0, 2.0]], {5, 6}, {5: [1.0]}))]
        both = ({(5, 6): 1.0}, {5, 6} if name == "sequence_bias" else None)
        value, wanted = rng.choice([*biases, both] if "bias" in name else words)
    others: dict[str, Any] = {"dry_multiplier": 1.0, "temperature": 1.0} if name.startswith("dry") else {}
    what = f"{name}={value!r:.60}"
    if wanted is None:
        return Case(what, lambda w: dx.generate(w.lm, IDS, max_new_tokens=NEW, **{name: value}, **others), (name,))
    ids = lambda tree: {int(t) for x in jax.tree.leaves(tree) if np.asarray(x).dtype == np.int32 and x.ndim > 1
                        for t in np.asarray(x).reshape(-1) if t >= 0}

    def found(w: World, request: Request) -> bool:
        if name == "eos_token_id":
            return ids(request.policy.eos) == wanted
        return any(ids(t) == wanted for t in request.policy.transforms)

    return Case(what, lambda w: Request.read(w.lm, IDS, **{name: value}, **others), (name,), found)
