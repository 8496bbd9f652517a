"""Prompts, negative prompts and pieces of every wrong form, and good ones in forms of their own."""

import collections
import decimal
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from tests.malformed.case import FIXED, IDS, NEW, Case, Thing, loop, rows


def endless(rng: random.Random) -> Iterator[Any]:
    return rng.choice([lambda: itertools.repeat("x"), itertools.count, lambda: itertools.repeat([1, 2])])()


def traced(lm: dx.LM) -> Any:
    return jax.jit(lambda x: dx.generate(lm, x, max_new_tokens=NEW).tokens)(jnp.array(IDS[1]))


def prompts(rng: random.Random) -> Case:
    wide = rng.randrange(375, 10 ** 9)
    rotten: list[Any] = [
        None, 3, 2.5, True, b"text", bytearray(b"x"), memoryview(b"x"), {"role": "user", "content": "x"}, {"text": "x"},
        {1, 2}, frozenset("a"), Thing(), Thing, len, float("nan"), 1j, decimal.Decimal(1), Path("x"), Ellipsis,
        [1.7, 2.2], [1.0, 2.0], [True, 2], [1, "a"], ["a", 1], [None], ["ab", None], [[1, None]], [[1.5]], [[1], 2],
        np.zeros((2, 2, 2), int), np.array(3), np.array([1.0, 2.0]), np.array([True, False]), np.array([1j]), [b"x"],
        np.ma.masked_array([1, 2], [False, True]), jnp.array([0.5]), [wide], [[1], [wide]], [-1], [[5], [-2]],
        [10 ** 30], np.array([2 ** 63], np.uint64), [], "", [""], [[]], np.array([]), np.zeros((2, 0), int), "a\ud800",
        ["ok", "\udfff"], [[{"role": "user", "content": "a\ud801"}]], [{"role": "user"}, "text"], [[{"role": "a"}, 3]],
        {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1], [1, 1]]}, {"input_ids": None},
        {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, {"input_ids": [[1, 2]], "attention_mask": [[1, 2]]},
        {"input_ids": [[1, 2]], "attention_mask": [[1, "a"]]}, {"input_ids": "text"}, {"input_ids": [[1.5]]},
        {"input_ids": [[1, 2]], "labels": [[1, 2]]}, {"input_ids": [[1, 2]], "attention_mask": [1]}, {"input_ids": []},
        {"input_ids": [["a"]]}, {"input_ids": [[wide]]}, {"input_ids": [[1]], "position_ids": [[0]]}, [[[[1]]]],
        [{"input_ids": [[1], [2]]}], loop(), range(10 ** 12), [range(10 ** 12)], [[1, 2], {3}], {"input_ids": {}}]
    kind = rng.randrange(10)
    if kind < 3:
        return form(rng)
    bad = rng.choice(rotten)
    name, takes = rng.choice(["prompts", "negative_prompts"]), rng.choice(["generate", "stream"])
    if kind == 3 and rng.random() < 0.5:
        bad = endless(rng)
    if kind == 4:
        pieces = rng.choice([None, "text", b"x", {"a": 3}, 5, [], [[]], ["a"], [["a", 0]], ["a", -1], ["a", 1.5, "b"],
                             ["a", True], ["a", None, 3], [[wide], 3], ["a", 3, b"x"], ["a", 3, {1}], [3, "a"],
                             ["a", 10 ** 9, "b"], ["a", float("nan")], ["a\ud800", 3], endless(rng), [Thing(), 3],
                             np.zeros((2, 2)), ["a", [1.5], 3], loop()])
        return Case(f"infill {pieces!r:.60}", lambda w: dx.infill(w.filling, pieces), ("pieces",))
    if kind == 5 and rng.random() < 0.3:
        return Case("a traced prompt", lambda w: traced(w.lm), ("prompts",))
    if name == "negative_prompts":
        if bad is None:
            bad = 3
        return Case(f"negative {bad!r:.60}", lambda w: dx.generate(w.lm, IDS, negative_prompts=bad, guidance_scale=2.0),
                    (name,))
    run = dx.generate if takes == "generate" else dx.stream
    return Case(f"{takes} {bad!r:.60}", lambda w: run(w.lm, bad, max_new_tokens=NEW), (name,))


def form(rng: random.Random) -> Case:
    """Good prompts in a form of their own: they say what the plain form says."""
    kind = rng.choice([np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64])
    wrap = rng.choice([list, tuple, collections.deque, iter, lambda x: (row for row in x)])
    row = rng.choice([list, tuple, lambda x: np.array(x, kind), jnp.array, lambda x: [kind(t) for t in x],
                      lambda x: {"input_ids": x}, lambda x: {"input_ids": [x], "attention_mask": [[1] * len(x)]}])
    ways = [lambda: wrap([row(x) for x in IDS]),
            lambda: {"input_ids": np.array([IDS[0], [*[rng.randrange(100)] * 3, *IDS[1]]], kind),
                     "attention_mask": np.array([[1] * 5, [0, 0, 0, 1, 1]], rng.choice([bool, int, np.float32]))},
            lambda: {"input_ids": [IDS[0], [*IDS[1], 7]], "attention_mask": [[1] * 5, [1, 1, 0]]}]
    way = rng.choice(ways)
    return Case("a form of prompts", lambda w: dx.generate(w.lm, way(), **FIXED), (),
                lambda w, out: rows(out) == w.reference)
