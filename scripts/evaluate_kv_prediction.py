"""What KV Prediction saves and loses, on the shipped `pycode` with `pycode-draft` as the auxiliary model.

    python scripts/evaluate_kv_prediction.py                    # maps of least squares, and trained in 300 steps
    python scripts/evaluate_kv_prediction.py --steps 0 4000 --together 4000

Maps are measured on files of the standard library that the models were trained on. Files that were held out are cut
into prompts and true continuations, of which it prints what a token costs, in nats, by teacher forcing: for the model
with all of the prompt, for each kind of maps, for the auxiliary model alone, and for the model with the prompt's newest
token alone. With `--together` the auxiliary model is trained with its maps. A second auxiliary model is the first half
of `pycode` itself, from which the layers of that half are predicted without an error. The time to the first token is
that of `decodax.generate` with one prompt and one new token; all take turns in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pycode_data as data

import decodax as dx
from decodax.core.cache import ReadPrompt
from decodax.core.window import causal
from decodax.train import fit_kv_prediction, train_kv_prediction


def pieces(documents: list[data.Document], lm: Any, size: int, count: int, each: int = 4) -> list[list[int]]:
    """So many pieces of `size` tokens, up to `each` of a file."""
    found: list[list[int]] = []
    for document in documents:
        ids = lm.tokenizer.encode(document.text)
        found += [ids[i:i + size] for i in range(0, min(len(ids), each * size) - size + 1, size)]
        if len(found) >= count:
            break
    return found[:count]


@functools.partial(jax.jit, static_argnums=(0, 3))
def forced(model: Any, params: Any, tokens: Any, prompt: int) -> Any:
    """`f32[B]`: nats of each row's tokens behind the first `prompt` of them, all but the newest of which are read as
    the model's cache reads a prompt."""
    B, n = tokens.shape
    before = jnp.full(B, prompt - 1, jnp.int32)
    cache = model.init_cache(B, n, params=params).for_prompt().replace(length=before)
    cache = cache.settled(ReadPrompt(model, params, tokens))
    return nats(model.apply(params, causal(tokens[:, prompt - 1:-1], before), cache).logits(), tokens[:, prompt:])


@functools.partial(jax.jit, static_argnums=(0, 3))
def whole(model: Any, params: Any, tokens: Any, prompt: int) -> Any:
    """The same, where the model reads all of the tokens."""
    return nats(model.forward(params, tokens[:, :-1])[:, prompt - 1:], tokens[:, prompt:])


def nats(logits: Any, tokens: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), tokens[..., None], -1)[..., 0].mean(-1)


def first_half(lm: Any) -> Any:
    """The model of the first half of its layers."""
    layers = lm.model.config.layers[:lm.model.depth // 2]
    params = {**lm.params, "layers": {str(i): lm.params["layers"][str(i)] for i in range(len(layers))}}
    model = dataclasses.replace(lm.model, config=dataclasses.replace(lm.model.config, layers=layers))
    return dataclasses.replace(lm, model=model, params=params, name=f"first half of {lm.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=int, default=128, metavar="N", help="texts to fit on (default: 128)")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 300], metavar="N",
                        help="of training, for each kind of maps (default: 0 300)")
    parser.add_argument("--together", type=int, nargs="*", default=[300], metavar="N",
                        help="steps of training the auxiliary model with its maps (default: 300)")
    parser.add_argument("--rate", type=float, default=2e-3, metavar="X", help="of training (default: 2e-3)")
    parser.add_argument("--texts", type=int, default=64, metavar="N", help="held-out texts (default: 64)")
    parser.add_argument("--prompt", type=int, default=384, metavar="N", help="tokens of their prompts (default: 384)")
    parser.add_argument("--after", type=int, default=128, metavar="N", help="and behind them (default: 128)")
    parser.add_argument("--timed", type=int, default=512, metavar="N", help="tokens of the timed prompt (default: 512)")
    parser.add_argument("--repeats", type=int, default=31, metavar="N", help="of each timing (default: 31)")
    args = parser.parse_args()

    lm, small = dx.load("pycode"), dx.load("pycode-draft")
    seen, unseen = data.load_corpus()
    size = args.prompt + args.after
    fitted, held = pieces(seen, lm, size, args.fit), np.array(pieces(unseen, lm, size, args.texts), np.int32)
    rows = [held[i:i + 8] for i in range(0, len(held), 8)]
    mean = lambda one: np.concatenate([np.asarray(one(jnp.asarray(part))) for part in rows])
    found = {"pycode": mean(lambda x: whole(lm.model, lm.params, x, args.prompt))}
    kinds: dict[str, Any] = {}
    half = first_half(lm)
    own = [min(i, half.model.depth - 1) for i in range(lm.model.depth)]
    for auxiliary, steps, layers in [*((small, steps, None) for steps in args.steps), (half, 0, own)]:
        begin, name = time.perf_counter(), f"{auxiliary.name}, {steps} steps"
        maps = jax.block_until_ready(fit_kv_prediction(lm, auxiliary, fitted, layers, steps=steps, rate=args.rate))
        print(f"{name}: fitted on {len(fitted)} texts of {size} tokens in {time.perf_counter() - begin:.1f} s")
        kinds[name] = dx.caches.make("kv-prediction", auxiliary=auxiliary, maps=maps)
        both = kinds[name].put_on(lm)
        found[name] = mean(lambda x, both=both: forced(both.model, both.params, x, args.prompt))
    for steps in args.together:
        begin, name = time.perf_counter(), f"{small.name} trained, {steps} steps"
        maps, trained = jax.block_until_ready(train_kv_prediction(lm, small, fitted, steps=steps, rate=args.rate))
        print(f"{name}: in {time.perf_counter() - begin:.1f} s")
        both = dx.caches.make("kv-prediction", auxiliary=trained, maps=maps).put_on(lm)
        found[name] = mean(lambda x, both=both: forced(both.model, both.params, x, args.prompt))
        found[f"{name}, alone"] = mean(lambda x, lm=trained: whole(lm.model, lm.params, x, args.prompt))
    found["pycode-draft alone"] = mean(lambda x: whole(small.model, small.params, x, args.prompt))
    found["pycode, no prompt"] = mean(lambda x: whole(lm.model, lm.params, x[:, args.prompt - 1:], 1))

    print(f"\nnats a token of {args.after} behind {args.prompt}, {len(held)} held-out texts; and above the first, with "
          "the standard error over texts")
    for name, each in found.items():
        more = each - found["pycode"]
        print(f"{name:34} {each.mean():.3f}  {more.mean():+.3f} +- {more.std(ddof=1) / len(more) ** 0.5:.3f}")

    text = pieces(unseen, lm, args.timed, 1)
    first, *_, last = kinds
    runs = {"pycode": lambda: dx.generate(lm, text, max_new_tokens=1),
            first: lambda: dx.generate(lm, text, max_new_tokens=1, cache=kinds[first]),
            last: lambda: dx.generate(lm, text, max_new_tokens=1, cache=kinds[last]),
            "pycode-draft alone": lambda: dx.generate(small, text, max_new_tokens=1)}
    took: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(args.repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            took[name] += [1e3 * (time.perf_counter() - begin)] if i else []        # the first compiles
    print(f"\nms to the first token of {args.timed}, median of {args.repeats} in turn, with the quartiles")
    for name, times in took.items():
        low, middle, high = statistics.quantiles(times, n=4)
        print(f"{name:34} {middle:.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
