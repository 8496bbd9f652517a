"""Evaluations of single methods: the loss on Python's standard library, in nats a token, against the same model without
them, and the attention that predictors find.

`less`, `reading` and `echo-att` are measured and trained on the modules `TRAIN`, the others on files that `pycode` was
trained on; other modules and held-out files are scored. Errors are standard errors over texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax import train
from decodax.bench.figures import show_table
from decodax.bench.timing import in_turn, median, seconds
from decodax.caches import Butler, LessKernels, make
from decodax.caches.sparse.quest import KeyBounds
from decodax.contrib import arc as arc_encoder
from decodax.core.capabilities import ReadPrompt, layers_read
from decodax.core.types import fit_cache
from decodax.core.window import causal
from decodax.models import Embeddings
from decodax.train.attention_predictor import attention_maps, scores_before
from decodax.train.corpus import load_corpus, pack
from decodax.train.token_butler import Scored, estimated
from recipes import recall

TRAIN = """ast asyncio.base_events calendar cgitb codecs collections configparser csv datetime decimal difflib doctest
email.message enum fractions ftplib functools gettext heapq http.client http.server imaplib inspect ipaddress
json.decoder logging logging.config mailbox mimetypes multiprocessing.pool optparse os pathlib pdb pickle platform
plistlib pprint random sched smtplib socket statistics string subprocess tempfile textwrap threading tokenize trace
traceback turtle typing unittest.case unittest.mock urllib.parse urllib.request uuid warnings weakref xml.dom.minidom
xmlrpc.client""".split()
TEST = "argparse tarfile zipfile shutil gzip locale netrc shlex".split()


def module_texts(lm: Any, names: Sequence[str], size: int, each: int) -> list[list[int]]:
    """Returns up to `each` texts of `size` tokens of each of the modules that exist in this Python."""
    found = []
    for name in names:
        try:
            ids = lm.tokenizer.encode(inspect.getsource(importlib.import_module(name)))
        except (ImportError, OSError):
            continue
        found += cut(ids, size)[:each]
    return found


def cut(ids: Any, size: int) -> list[Any]:
    """Returns pieces of `size` tokens of a text, without the rest."""
    return [ids[i:i + size] for i in range(0, len(ids) - size + 1, size)]


def file_texts(lm: Any, size: int, counts: Sequence[int], each: int = 4) -> Iterator[list[list[int]]]:
    """Yields pieces of `size` tokens of training files, then of held-out ones: `counts` of them, up to `each` of a
    file."""
    for documents, count in zip(load_corpus(), counts, strict=True):
        found: list[list[int]] = []
        for document in documents:
            if len(found) < count:
                found += cut(lm.tokenizer.encode(document.text)[:each * size], size)
        yield found[:count]


def nats(lm: Any, texts: Any, start: int = 1, stop: int | None = None) -> np.ndarray:
    """Returns the mean nats of the tokens `start` to `stop` of each text, which are given all tokens before them."""
    return -np.array([x[start - 1:None if stop is None else stop - 1].mean() for x in dx.score(lm, texts).logprobs])


def show_losses(found: Mapping[str, np.ndarray], title: str, **columns: Mapping[str, str]) -> None:
    """Prints the mean nats a token of each method, and the difference to the first, with standard errors.

    Args:
        found: one figure for each text, by method. title: title of the table.
        columns: further cells, by title and method.
    """
    first = next(iter(found.values()))
    rows = [(name, shown(each), shown(each - first), *(column.get(name, "") for column in columns.values()))
            for name, each in found.items()]
    show_table(("", "nats a token", "above the first", *(c.replace("_", " ") for c in columns)), rows, title)


def shown(each: np.ndarray) -> str:
    """Returns the mean with its standard error as text."""
    return f"{each.mean():.4f} ± {each.std(ddof=1) / len(each) ** 0.5:.4f}"


@functools.partial(jax.jit, static_argnums=(0, 3))
def forced(model: Any, params: Any, tokens: Any, prompt: int) -> Any:
    """Returns the mean nats of each row's tokens after the first `prompt`, which a cache reads as a prompt but for the
    newest of them, `f32[B]`; one token a round."""
    B, n = tokens.shape
    before, cache = jnp.full(B, prompt - 1, jnp.int32), model.init_cache(B, n, params=params).prefill_cache()
    if layers_read(cache) == 0:
        cache = cache.replace(length=before)
    else:
        window = causal(tokens[:, :prompt - 1], jnp.zeros(B, jnp.int32)).replace(is_prefill=True)
        cache = cache.commit(model.apply(params, window, cache).entries, window.positions)
    cache = cache.finish_prefill(ReadPrompt(model, params, tokens))

    def step(cache: Any, at: Any) -> tuple[Any, Any]:
        window = causal(jax.lax.dynamic_slice_in_dim(tokens, at, 1, 1), jnp.broadcast_to(at, (B,)))
        out = model.apply(params, window, cache)
        logp = jax.nn.log_softmax(out.logits()[:, 0], -1)
        next_one = jax.lax.dynamic_slice_in_dim(tokens, at + 1, 1, 1)
        return cache.commit(out.entries, window.positions), -jnp.take_along_axis(logp, next_one, 1)[:, 0]

    return jax.lax.scan(step, cache, jnp.arange(prompt - 1, n - 1, dtype=jnp.int32))[1].mean(0)


def less(args: argparse.Namespace) -> None:
    """A dense cache, a window of 64 tokens, a wider window, and the window with the state of LESS. Texts have 512
    tokens, which count from 128 on."""
    lm, size, rank, window = dx.load("pycode"), 512, 8, dict(start_size=4, recent_size=64)
    seen, new = module_texts(lm, TRAIN, size, 2), module_texts(lm, TEST, size, 4)
    kernels = train.fit_less(lm, seen, rank=rank, hidden=128, epochs=args.epochs, rate=5e-3, dropout=0.0,
                             progress=True, **window)
    layers = [kernels.layer(i) for i in range(lm.model.depth)]
    without = LessKernels.of([x.replace(scale=jnp.zeros_like(x.scale)) for x in layers])
    # a state of rank r takes the bytes of r / 2 tokens, so the authors compare with a window that is wider by these
    kinds = {"dense": None, "window": make("less", kernels=without, **window),
             "wider": make("less", kernels=without, start_size=4, recent_size=64 + rank // 2),
             "less": make("less", kernels=kernels, **window)}
    found, held = {}, {}
    for name, kind in kinds.items():
        scored = lm if kind is None else dataclasses.replace(lm, model=lm.model.with_cache(kind))
        found[name], cache = nats(scored, new, 128), scored.model.init_cache(1, size)
        used = size if kind is None else kind.start_size + kind.recent_size
        held[name] = str(sum(x[:, :, :used].nbytes for x in cache.kv)
                         + sum(x.nbytes for x in (cache.states if name == "less" else ())))
    show_losses(found, f"{len(seen)} texts, {args.epochs} epochs; {len(new)} texts are scored", bytes=held)


def reading(args: argparse.Namespace) -> None:
    """Caches that read a part of the text, against as many of the first and the latest tokens: 128 tokens after 384
    that are read as a prompt."""
    lm, size, sinks, recent, taken = dx.load("pycode"), 512, 4, 32, 8
    seen, new = module_texts(lm, TRAIN, size, 1), module_texts(lm, TEST, size, 4)
    books = train.fit_key_books(lm, seen, 256, 128, 20)
    some = sinks + recent + taken * (lm.model.config.heads // lm.model.config.kv_heads)
    pages = dict(budget=some - recent, page_size=4, recent=recent, skip=())
    kinds = {"dense": None, f"sink-window:budget={some}": make("sink-window", budget=some, n_sink=sinks),
             "a2ats": make("a2ats", books=books, budget=taken, sinks=sinks, recent=recent, distance=128),
             "act-qkv": make("act-qkv", sinks=sinks, recent=recent, block_size=4, window_size=recent, samples=32,
                             least=1, room=1, budget=some),
             "quest": make("quest", **pages),
             **{f"retro-attention:window={n}": make("retro-attention", window=n, **pages) for n in (2, 4, 8)}}
    found = {}
    for name, kind in track(kinds.items(), "scoring", console=Console(stderr=True)):
        scored = lm if kind is None else kind.put_on(lm)
        found[name] = np.array(forced(fit_cache(scored.model, size), scored.params, jnp.array(new, jnp.int32), 384))
    show_losses(found, f"{len(seen)} texts, 256 centroids; {len(new)} texts are scored")


def echo_att(args: argparse.Namespace) -> None:
    """Layers 1 and 2 share attention: before, after the conversion, and after distillation."""
    lm, size = dx.load("pycode"), 256
    seen, new = module_texts(lm, TRAIN, size, 8), module_texts(lm, TEST, size, 8)
    found, held = {"original": nats(lm, new)}, {}
    for steps in (0, args.steps):
        student = train.fit_echo_att(lm, seen, groups=((1, 2),), steps=steps, rate=3e-4)
        found[name := f"{steps} steps"] = nats(student, new)
        held[name] = str(sum(x.nbytes for x in student.model.init_cache(1, size).kv) // size)
    show_losses(found, f"{len(seen)} texts, {len(new)} are scored", bytes_a_token=held)


def kv_prediction(args: argparse.Namespace) -> None:
    """KV Prediction with `pycode-draft`, alone and trained with its maps, and with the first half of `pycode`, as the
    auxiliary model: loss of 128 tokens after 384, and the time to the first token."""
    lm, small, prompt, after = dx.load("pycode"), dx.load("pycode-draft"), 384, 128
    fitted, held = file_texts(lm, prompt + after, (128, 64))
    layers = lm.model.config.layers[:lm.model.depth // 2]
    model = dataclasses.replace(lm.model, config=dataclasses.replace(lm.model.config, layers=layers))
    half = dataclasses.replace(lm, model=model, name=f"first half of {lm.name}", params={
        **lm.params, "layers": {str(i): lm.params["layers"][str(i)] for i in range(len(layers))}})
    own = [min(i, len(layers) - 1) for i in range(lm.model.depth)]      # predicted without an error
    together = train.train_kv_prediction(lm, small, fitted, steps=args.steps, rate=2e-3)
    kinds: dict[str, Any] = {name: make("kv-prediction", auxiliary=auxiliary, maps=maps) for name, maps, auxiliary in (
        (small.name, train.fit_kv_prediction(lm, small, fitted), small),
        (half.name, train.fit_kv_prediction(lm, half, fitted, own), half),
        (f"{small.name}, trained together", *together))}
    found = {"pycode": nats(lm, held, prompt)}
    for name, kind in kinds.items():
        both = kind.put_on(lm)
        found[name] = np.concatenate([forced(both.model, both.params, jnp.array(held[i:i + 8], jnp.int32), prompt)
                                      for i in range(0, len(held), 8)])
    found["pycode, no prompt"] = nats(lm, [text[prompt - 1:] for text in held])
    show_losses(found, f"{after} tokens after {prompt}, {len(held)} held-out texts")

    _, text = file_texts(lm, 512, (0, 1))
    times = in_turn({name: seconds(functools.partial(dx.generate, lm, text, max_new_tokens=1, cache=kinds.get(name)))
                     for name in ("pycode", small.name, half.name)}, 31)
    show_table(("", "ms"), [(name, f"{1e3 * median(took):.1f}") for name, took in times.items()],
               "time to the first token of 512")


def arc(args: argparse.Namespace) -> None:
    """A context of 128 tokens as tokens, as the vectors of an ARC-Encoder, and not at all, before as many tokens."""
    lm, size = dx.load("pycode"), 128
    seen, unseen = ([lm.tokenizer.encode(document.text) for document in part] for part in load_corpus())
    pieces = np.array([piece for text in unseen for piece in cut(text, 2 * size)], np.int32)
    pieces = pieces[np.random.default_rng(1).permutation(len(pieces))[:96]]
    first, second = pieces[:, :size], pieces[:, size:]
    encoder = arc_encoder.fit(arc_encoder.begin(lm, layers=4, pool=4, hidden=512), lm, seen, size=size, rate=1e-3,
                              steps=args.steps, batch=8, seed=0, warmup=args.steps // 10, bridge_rate=2e-3,
                              continuation=0.8, progress=True)

    def costs(front: Any, text: np.ndarray) -> np.ndarray:
        front, given = jnp.asarray(front), None
        M, width = front.shape[1], front.shape[1] + text.shape[1]
        if front.ndim == 3:
            given = Embeddings(values=jnp.pad(front, ((0, 0), (0, text.shape[1]), (0, 0))),
                               given=jnp.broadcast_to(jnp.arange(width) < M, (len(text), width)))
            front = jnp.zeros(front.shape[:2], jnp.int32)
        hidden, head = lm.model.features(lm.params, jnp.concatenate([front, text], 1), inputs=given)
        logits = jax.nn.log_softmax(head(hidden[:, M:-1]))
        return -np.asarray(jnp.take_along_axis(logits, jnp.asarray(text)[:, 1:, None], -1)[..., 0].mean(-1))

    vectors = np.stack(encoder.vectors(list(first)))
    few = vectors.shape[1]
    show_losses({"tokens": costs(first, second), f"{few} vectors": costs(vectors, second),
                 f"the last {few} tokens": costs(first[:, -few:], second),
                 "vectors of another text": costs(np.roll(vectors, 1, 0), second), "none": costs(first[:, :0], second)},
                f"{args.steps} steps of 8 texts; {len(pieces)} texts are scored")


def linearize(args: argparse.Namespace) -> None:
    """Layers get the linear attention of Linearized-LLM (You et al., 2024), and all weights are trained towards the
    distributions of the original model (Hinton et al., 2015)."""
    lm, size, group = dx.load("pycode"), 512, 64
    student = lm.with_linear_attention(args.layers, group, 63)
    seen, unseen = (pack(lm.tokenizer.backend, documents) for documents in load_corpus())
    rows, held = np.array(cut(seen, size), np.int32), [text.tolist() for text in cut(unseen, size + 1)[:64]]

    def loss(params: Any, was: Any, batch: Any) -> Any:
        aim = jax.nn.softmax(lm.model.forward(was, batch))
        return optax.softmax_cross_entropy(student.model.forward(params, batch), aim).mean()

    schedule, order = optax.cosine_decay_schedule(1e-3, args.steps), np.random.default_rng(0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.0))
    batches = ((lm.params, rows[order.integers(0, len(rows), 4)]) for _ in range(args.steps))
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), student.params)
    params, _ = train.fitting.train(loss, params, batches, tx, args.steps, "distilling")
    models = {"original": lm, "linearized": student, "distilled": student.with_params(params)}
    part = lambda start, stop: {name: shown(nats(one, held, start, stop)) for name, one in models.items()}
    show_losses({name: nats(one, held) for name, one in models.items()}, f"{len(held)} held-out texts",
                **{f"the_first_{group}": part(1, group + 1), "the_rest": part(group + 1, None)})


BLOCK, HISTORY, BUDGET, NEAR = 16, 64, 128, 16
"""Tokens of a block, of the history of the predictor, that are read, and that are always read at both ends."""


def best(worth: Array, count: int) -> Array:
    """Returns True for the `count` largest finite values, `bool[..., n]`."""
    found, at = jax.lax.top_k(worth, count)
    return jax.nn.one_hot(jnp.where(found > -jnp.inf, at, -1), worth.shape[-1], dtype=bool).any(-2)


@functools.partial(jax.jit, static_argnums=0)
def shares(model: Any, params: Any, net: Any, butler: Butler, tokens: Array, at: Array) -> dict[str, Array]:
    """Returns the share of attention `f32[L - 1, H]` of the token at `at` (`i32[]`) that goes to the tokens read, by
    the way to choose them."""
    maps, images = attention_maps(model, BLOCK, params, tokens)
    maps, images = maps[1:], images[1:]
    (L, H, T, _), n = maps.shape, images.shape[3]
    row, token = maps[:, :, at], jnp.arange(T)
    worth, free = scores_before(net, images.reshape(L * H, T, n), at, -(-at // BLOCK), HISTORY, NEAR // BLOCK,
                                NEAR // BLOCK)
    blocks = best(jnp.where(free, worth, -jnp.inf), (BUDGET - 2 * NEAR) // BLOCK).reshape(L, H, n)
    always = (token < NEAR) | ((token > at - NEAR) & (token <= at))
    reads = {"attention-predictor": blocks.repeat(BLOCK, -1)[..., :T] | always}
    found, _ = estimated(model, params, butler, tokens[None])
    guess = jnp.where((token <= at) & (token >= 4), found[:, 0, :, at], -jnp.inf)
    reads["token-butler"] = best(guess, BUDGET - 4) | (token < 4)
    entries = model.apply(params, causal(tokens[None], jnp.zeros(1, jnp.int32)), Scored()).entries[1:]
    rule, start = KeyBounds(), jnp.maximum(at - NEAR, 0) // BLOCK
    quest = []
    for q, k in entries:
        keys = k[0].swapaxes(0, 1).astype(jnp.float32)
        pages = rule.digest(keys[:, :T // BLOCK * BLOCK].reshape(len(keys), -1, BLOCK, keys.shape[-1]))
        bound = rule(q[0, at].astype(jnp.float32).reshape(len(keys), -1, keys.shape[-1]), pages).max(1)
        bound = jnp.where(jnp.arange(bound.shape[1]) < start, bound, -jnp.inf)
        taken = best(bound, (BUDGET - NEAR - BLOCK) // BLOCK).repeat(BLOCK, -1)
        taken = jnp.pad(taken, ((0, 0), (0, T - taken.shape[1]))) | ((token >= start * BLOCK) & (token <= at))
        quest.append(taken.repeat(H // len(keys), 0))
    reads["quest"] = jnp.stack(quest)
    reads["the latest"] = jnp.broadcast_to((token < 4) | (token > at - BUDGET + 4), row.shape)
    reads["the largest weights"] = best(row, BUDGET)
    return {name: jnp.where(some & (token <= at), row, 0).sum(-1) for name, some in reads.items()}


def predictors(args: argparse.Namespace) -> None:
    """Share of attention that goes to the tokens that trained predictors read, at the tokens of answers of `recall`.

    `token-butler` and `attention-predictor` are trained on 48 texts of 1,024 words. On other texts the table gives the
    share of full attention (of all layers but the first) to tokens chosen for each head by these two and by the largest
    weights (the upper bound), for a group of heads by Quest's bounds, and by a window.
    """
    lm, drawn, size = dx.load("recall"), random.Random(1), 1024
    texts = [np.asarray(recall.training_text(size, drawn)[0]).tolist()[:size] for _ in range(48)]
    net = train.fit_attention_predictor(lm, texts, steps=args.steps, batch=2, sinks=NEAR, recent=NEAR, skip=(0,))
    butler = train.fit_token_butler(lm, texts, steps=args.butler_steps, reduce=4)
    found: dict[str, list[Any]] = {}
    asked = [problem for task in ("recall", "needle", "values", "copy")
             for problem in recall.problems(task, 4, size - 100, seed=7)]
    for problem in track(asked, "measuring", console=Console(stderr=True)):
        ids = [lm.tokenizer.encode(text) for text in (problem.context, problem.question, problem.answer)]
        end, before = sum(map(len, ids)), len(ids[0]) + len(ids[1])
        text = np.zeros(-(-end // 64) * 64, np.int32)
        text[:end] = np.concatenate(ids)
        for at in range(before - 1, end - 1)[:4]:
            for name, x in shares(lm.model, lm.params, net.arrays, butler, jnp.asarray(text), jnp.int32(at)).items():
                found.setdefault(name, []).append(np.asarray(x).mean(-1))
    show_table(("", "share"), [(name, shown(np.array(x).mean(-1))) for name, x in found.items()],
               "share of attention to tokens read")


def main(args: argparse.Namespace) -> None:
    """Runs the function that is named after the subcommand."""
    {"less": less, "reading": reading, "echo-att": echo_att, "kv-prediction": kv_prediction, "arc": arc,
     "linearize": linearize, "predictors": predictors}[args.command](args)
