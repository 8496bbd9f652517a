"""Models, methods, stop strings, transforms, names that there are none of, and what does not go together."""

import dataclasses
import itertools
import math
import random
from pathlib import Path

import jax.numpy as jnp

import decodax as dx
from decodax.engine.names import by_name
from decodax.engine.request import Request
from decodax.sampling import Temperature
from tests.malformed.case import IDS, Case, Thing


def others(rng: random.Random) -> Case:
    pair = lambda name, values: (name, rng.choice(values), (name,))
    wrong_batch = Temperature(jnp.zeros(3))
    name, value, names = rng.choice([
        pair("algorithm", ["nope", "prompt-lookup:length=0", "prompt-lookup:length", "prompt-lookup:length='a'", "", 5,
                           "prompt-lookup:5", "prompt-lookup:__import__('os')", "prompt-lookup:length=__import__('os')",
                           b"prompt-lookup", dx.Autoregressive, {}, len, Thing(), "llada", "seed-exact",
                           dx.drafts.PromptLookup(), [dx.Autoregressive()], "prompt-lookup:" + "(" * 5000, "stand:x=1",
                           dx.MaskedDiffusion(dx.algorithms.diffusion.Adapter(3))]),
        ("lm", rng.choice([None, 5, "nope", "", b"pycode", Path("/nope"), {}, Thing(), "\0"]), ("lm", "model")),
        pair("stop", [5, "", [""], [5], b"x", [b"x"], {"a": 1}, Thing(), "\ud800", ["ok", "\udc80"], "x" * 70_000,
                      ["ab"] * 70_000, [None], [["a"], ["b"]], math.nan, True, itertools.repeat("ab")]),
        pair("transforms", [5, "x", [5], Temperature, wrong_batch, (wrong_batch,), {}, [None]]),
        pair("watermarking_config", [5, "x", {"bias": "x"}, {"nope": 1}, {"greenlist_ratio": 2}, {"hashing_key": -1},
                                     {"seeding_scheme": "x"}, {"seeding_scheme": [1]}, {"context_width": 0}, [1],
                                     {"bias": math.nan}, {"hashing_key": 1.5}, {"context_width": True}]),
        pair("exponential_decay_length_penalty", [5, (1,), "ab", ("a", 1.1), (1, "x"), (1.5, 1.1), (-1, 1.1), (1, 0),
                                                  (1, math.nan), {}, [1, 2, 3], Thing()]),
        pair("guidance_scale", ["2", b"2", True, [1.0], [2.0] * 3, math.nan, math.inf, Thing(), {}, [[2.0]], 1j]),
        pair("max_time", [0, -1, "1", True, math.nan, math.inf, [1.0], Thing(), 1j, {}, b"1"]),
        pair("forced_bos_token_id", [375, 10 ** 9, 1.5, "1", -2, [1], Thing(), math.nan, True]),
        *[(n, 1, (n,)) for n in ("temprature", "max_tokens", "batch", "vocab_size", "stops", "num_beam", "streamer",
                                 "generation_config", "zzz", "attention_mask", "n", "where",
                                 "ends", "every", "behind")],
        pair("num_beams", [0, "x", 1.5, [1], -1, Thing()]),
        pair("num_return_sequences", [0, "x", 1.5, [1], -1, Thing()]),
        pair("regex", ["(", 3, ["a", "b", "c"], Thing()]),
        pair("json_schema", ["{", 3, {"not": {}}, ["a"], Thing()]), pair("choices", ["x", [], [""], [3], Thing()]),
        pair("penalty_alpha", [1.6, "x", -1, Thing()]), pair("dola_layers", ["x", [99], 3, [1.5], Thing()]),
        pair("grammar", ["start: (", "x", 3, Thing(), "start: b", ""]),
        pair("tools", ["x", [], [3], [{"a": 1}], Thing()]),
        pair("required_phrases", [3, [""], [3], Thing()]), pair("banned_phrases", [3, [""], [[3]], Thing()]),
        pair("constraint_after", ["x", 3, ""]), pair("tool_choice", ["auto", 3]),
        pair("constraint", [3, "x", "regex", ["a"], Thing(), b"x", {}]),
        pair("fsd_alpha", [2, "x", -1, Thing()]), pair("bregman_lambda", ["x", -1, math.nan]),
        pair("adapter", ["x", 3, ["x"], [None, "x"], [3], Thing(), {}, b"x"]),
        pair("nmst_epsilon", ["x", 1, -1]), pair("arithmetic_sampling", ["x", 3, Thing()])])
    what = f"{name}={value!r:.60}"
    draw = rng.random()
    if draw < 0.12:
        both = rng.choice([dict(max_new_tokens=3, max_length=9), dict(eos=1, eos_token_id=1), dict(top_p=0.9),
                           dict(negative_prompts="x"), dict(negative_prompts=["a"] * 3, guidance_scale=2.0),
                           dict(xtc_threshold=0.2), dict(dry_base=2.0), dict(temperature=0.0, do_sample=True),
                           dict(temperature=float("inf"))])
        return Case(f"{both}", lambda w: dx.generate(w.lm, IDS, **both), tuple(both))
    if draw < 0.18:
        bare = lambda w: dataclasses.replace(w.lm, tokenizer=None)
        run = rng.choice([lambda w: dx.generate(bare(w), "x"), lambda w: dx.generate(bare(w), IDS, stop="x"),
                          lambda w: dx.stream(bare(w), IDS[0]), lambda w: dx.stream(w.lm, IDS)])
        return Case("a model without a tokenizer", run, ("prompts[0]", "stop", "stream"))
    if draw < 0.24:
        fills = rng.choice([lambda w: dx.watch(w.lm, IDS[0]), lambda w: dx.infill(w.lm, ["a", 3]),
                            lambda w: dx.generate(w.filling, IDS, algorithm=dx.Autoregressive()),
                            lambda w: dx.watch(w.filling, IDS[0], algorithm=dx.Autoregressive()),
                            lambda w: dx.generate(w.filling, IDS, negative_prompts=IDS, guidance_scale=2.0),
                            lambda w: dx.infill(w.filling, [[40], 3], max_new_tokens=3)])
        return Case("a method that does not fit", fills, ("lm", "algorithm", "negative_prompts", "max_new_tokens"))
    if name == "lm":
        return Case(what, lambda w: dx.generate(value, IDS), names)
    given = {"eos_token_id": [5]} if name.startswith("exponential") else {}
    if name == "stop" and rng.random() < 0.3:
        good = rng.choice(["zz", ["zz", "yy"], ("zz",), {"zz"}, [], "日", ["z" * 1000]])
        strings = (good,) if isinstance(good, str) else tuple(good)
        return Case(f"stop={good!r:.40}", lambda w: Request.read(w.lm, IDS, stop=iter(good) if good == [] else good),
                    names, lambda w, request: request.stop == strings)
    return Case(what, lambda w: dx.generate(w.lm, IDS, **by_name({name: value, **given})), names)
