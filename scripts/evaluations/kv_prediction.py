"""Loss and time to the first token of KV Prediction, on `pycode` with `pycode-draft` as the auxiliary model.

Maps are measured on files of the standard library that the models were trained on. Held-out files are cut into prompts
and true continuations, whose cost in nats a token is measured by teacher forcing: for the model with the whole prompt,
for each kind of maps, for the auxiliary model alone, and for the model with only the newest token of the prompt. With
`--together` the auxiliary model is trained with its maps. A second auxiliary model is the first half of `pycode`
itself, from which the layers of that half are predicted without an error. The time to the first token is that of
`decodax.generate` with one prompt and one new token; all methods run in turn in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.bench.figures import reporting, show_table
from decodax.bench.timing import in_turn, seconds
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal
from decodax.train import fit_kv_prediction, train_kv_prediction
from decodax.train.corpus import Document, load_corpus
from evaluations.texts import show_losses


def pieces(documents: list[Document], lm: Any, size: int, count: int, each: int = 4) -> list[list[int]]:
    """Returns `count` pieces of `size` tokens, up to `each` of a file."""
    found: list[list[int]] = []
    for document in documents:
        ids = lm.tokenizer.encode(document.text)
        found += [ids[i:i + size] for i in range(0, min(len(ids), each * size) - size + 1, size)]
        if len(found) >= count:
            break
    return found[:count]


@functools.partial(jax.jit, static_argnums=(0, 3))
def forced(model: Any, params: Any, tokens: Any, prompt: int) -> Any:
    """Returns the mean nats of each row's tokens after the first `prompt`, `f32[B]`; the cache reads the prompt but for
    its newest token."""
    B, n = tokens.shape
    before = jnp.full(B, prompt - 1, jnp.int32)
    cache = model.init_cache(B, n, params=params).prefill_cache().replace(length=before)
    cache = cache.finish_prefill(ReadPrompt(model, params, tokens))
    return nats(model.apply(params, causal(tokens[:, prompt - 1:-1], before), cache).logits(), tokens[:, prompt:])


@functools.partial(jax.jit, static_argnums=(0, 3))
def whole(model: Any, params: Any, tokens: Any, prompt: int) -> Any:
    """Returns the same for a model that reads all tokens."""
    return nats(model.forward(params, tokens[:, :-1])[:, prompt - 1:], tokens[:, prompt:])


def nats(logits: Any, tokens: Any) -> Any:
    """Returns the mean nats of tokens `i32[B, T]`, `f32[B]`."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), tokens[..., None], -1)[..., 0].mean(-1)


def first_half(lm: Any) -> Any:
    """Returns the model of the first half of its layers."""
    layers = lm.model.config.layers[:lm.model.depth // 2]
    params = {**lm.params, "layers": {str(i): lm.params["layers"][str(i)] for i in range(len(layers))}}
    model = dataclasses.replace(lm.model, config=dataclasses.replace(lm.model.config, layers=layers))
    return dataclasses.replace(lm, model=model, params=params, name=f"first half of {lm.name}")


def main(args: argparse.Namespace) -> None:
    """Fits the maps, and prints losses and times."""
    lm, small = dx.load("pycode"), dx.load("pycode-draft")
    seen, unseen = load_corpus()
    size = args.prompt + args.after
    fitted, held = pieces(seen, lm, size, args.fit), np.array(pieces(unseen, lm, size, args.texts), np.int32)
    rows = [held[i:i + 8] for i in range(0, len(held), 8)]
    mean = lambda one: np.concatenate([np.asarray(one(jnp.asarray(part))) for part in rows])
    found = {"pycode": mean(lambda x: whole(lm.model, lm.params, x, args.prompt))}
    kinds: dict[str, Any] = {}
    half = first_half(lm)
    own = [min(i, half.model.depth - 1) for i in range(lm.model.depth)]
    cases = [*((small, steps, None) for steps in args.steps), (half, 0, own)]
    with reporting() as report:
        for i, (auxiliary, steps, layers) in enumerate(cases):
            name = f"{auxiliary.name}, {steps} steps"
            report(i, len(cases) + len(args.together), name)
            maps = fit_kv_prediction(lm, auxiliary, fitted, layers, steps=steps, rate=args.rate)
            kinds[name] = dx.caches.make("kv-prediction", auxiliary=auxiliary, maps=maps)
            both = kinds[name].put_on(lm)
            found[name] = mean(lambda x, both=both: forced(both.model, both.params, x, args.prompt))
        for i, steps in enumerate(args.together):
            name = f"{small.name} trained, {steps} steps"
            report(len(cases) + i, len(cases) + len(args.together), name)
            maps, trained = train_kv_prediction(lm, small, fitted, steps=steps, rate=args.rate)
            both = dx.caches.make("kv-prediction", auxiliary=trained, maps=maps).put_on(lm)
            found[name] = mean(lambda x, both=both: forced(both.model, both.params, x, args.prompt))
            found[f"{name}, alone"] = mean(lambda x, lm=trained: whole(lm.model, lm.params, x, args.prompt))
    found["pycode-draft alone"] = mean(lambda x: whole(small.model, small.params, x, args.prompt))
    found["pycode, no prompt"] = mean(lambda x: whole(lm.model, lm.params, x[:, args.prompt - 1:], 1))
    show_losses(found, f"{args.after} tokens after {args.prompt}, {len(held)} held-out texts")

    text = pieces(unseen, lm, args.timed, 1)
    first, *_, last = kinds
    one = lambda lm, **given: seconds(lambda: dx.generate(lm, text, max_new_tokens=1, **given))
    times = in_turn({"pycode": one(lm), first: one(lm, cache=kinds[first]), last: one(lm, cache=kinds[last]),
                     "pycode-draft alone": one(small)}, args.repeats)
    table = []
    for name, took in times.items():
        low, middle, high = (1e3 * x for x in statistics.quantiles(took, n=4))
        table.append((name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}"))
    show_table(("", "ms", "quartiles"), table, f"time to the first token of {args.timed}, median of {args.repeats}")
