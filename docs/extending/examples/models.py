"""Models beyond dense decoders: a gated delta net, T5, experts, soft prompts, a model of flax.nnx, and a model around
another one.

All of it runs as one program, `tests/extending` runs it, and the pages of docs/extending explain the contracts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import decodax as dx
from decodax import cache
from decodax.cache import Recurrent
from decodax.core.around import AroundModel
from decodax.core.types import no_inputs
from decodax.models import Embeddings, EncoderDecoder, EncoderText, Experts, Transformer, llama, t5


def step(S, x):
    """S: f[B, H, d, d]. x: q, k, v f[B, H, d], decay and rate f[B, H]. Gives the next S and f[B, H, d]."""
    S = S * x["decay"][..., None, None]
    error = x["v"] - jnp.einsum("bhkv,bhk->bhv", S, x["k"])
    S = S + jnp.einsum("bhk,bhv->bhkv", x["k"], x["rate"][..., None] * error)
    return S, jnp.einsum("bhkv,bhk->bhv", S, x["q"])


@dataclasses.dataclass(frozen=True)
class DeltaNet(dx.Model):
    vocab: int
    heads: int = 2
    width: int = 8          # of a head
    layers: int = 2

    def init_params(self, key):
        D, H = self.heads * self.width, self.heads
        shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "gates": (D, 2 * H)}
        normal = lambda key, shape: jax.random.normal(key, shape) * shape[0] ** -0.5
        first, *rest = jax.random.split(key, 1 + self.layers)
        return {"embed": jax.random.normal(first, (self.vocab, D)),
                "layers": [{name: normal(k, shape) for k, (name, shape) in
                            zip(jax.random.split(key, 5), shapes.items(), strict=True)} for key in rest]}

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        no_inputs(self, inputs)
        empty = lambda: jnp.zeros((batch, self.heads, self.width, self.width))
        return Recurrent(states=tuple(empty() for _ in range(self.layers)), length=jnp.zeros(batch, jnp.int32),
                         size=capacity)

    def apply(self, params, window, cache):
        x, entries = params["embed"][window.tokens], []                       # [B, W, D]
        split = lambda y: y.reshape(*y.shape[:2], self.heads, self.width)
        unit = lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True)
        for layer, p in enumerate(params["layers"]):
            y = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            q, k, v = (split(y @ p[name]) for name in "qkv")
            decay, rate = jnp.split(jax.nn.sigmoid(y @ p["gates"] + 1), 2, -1)
            read, entry = cache.walk(layer, step, dict(q=unit(q), k=unit(k), v=v, decay=decay, rate=rate), window)
            x = x + read.reshape(x.shape) @ p["o"]
            entries.append(entry)
        return dx.Out(hidden=x, entries=entries, head=lambda hidden: hidden @ params["embed"].T)


net = DeltaNet(vocab=64)
recurrent = dx.LM(model=net, params=net.init_params(jax.random.key(0)), vocab_size=64)
prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [1, 5]]
plain = dx.generate(recurrent, prompts, max_new_tokens=12)


lookup = dx.Speculative(dx.drafts.PromptLookup(length=4))
assert (dx.generate(recurrent, prompts, max_new_tokens=12, algorithm=lookup).tokens == plain.tokens).all()


shape = llama(vocab=64, width=16, layers=3, heads=2, mlp=32)
clasp = dx.Speculative(dx.drafts.CLaSp(skips=1))        # it runs the target's layers one by one
try:
    dx.generate(recurrent, prompts, max_new_tokens=12, algorithm=clasp)
    refused = ""
except ValueError as error:
    refused = str(error)
assert refused == "model: got DeltaNet, takes a Transformer, whose layers run one by one"


target = dx.LM(model=Transformer(shape), params=Transformer(shape).init_params(jax.random.key(1)), vocab_size=64)
tree = dx.Speculative(dx.drafts.DraftModel(recurrent), shape=dx.trees.Fixed.balanced(2, 2))
drafted = dx.generate(target, prompts, max_new_tokens=12, temperature=1.0, seed=7, algorithm=tree)
alone = dx.generate(target, prompts, max_new_tokens=12, temperature=1.0, seed=7)
assert (drafted.tokens == alone.tokens).all()


pair = EncoderDecoder(t5(vocab=40, width=16, heads=2, head_dim=8, mlp=32, encoder=2, decoder=2))
translator = dx.LM(model=pair, params=pair.init_params(jax.random.key(2)), vocab_size=40)

source = EncoderText.of([[7, 8, 9, 10, 1], [11, 12, 1]])
out = dx.generate(translator, [[0], [0]], inputs=source, max_new_tokens=8, temperature=1.0, num_samples=2)
assert out.tokens.shape == (4, 8)                       # two rows for each source


dense = llama(vocab=64, width=16, layers=2, heads=2, mlp=32)
sparse = dataclasses.replace(dense.layers[1], experts=Experts(count=6, chosen=2, width=12))
mixture = Transformer(dataclasses.replace(dense, layers=(dense.layers[0], sparse)))
experts = dx.LM(model=mixture, params=mixture.init_params(jax.random.key(3)), vocab_size=64)
out = dx.generate(experts, prompts, max_new_tokens=12, algorithm=lookup)


soft = np.random.default_rng(0).normal(0, 0.02, (2, 3, 16)).astype(np.float32)       # 3 embeddings for each prompt
given = np.ones((2, 3), bool)
out = dx.generate(target, [[0, 0, 0, 5, 6], [0, 0, 0, 7]], inputs=Embeddings(soft, given), max_new_tokens=8)


class Net(nnx.Module):
    """A layer of attention. It is split once: its structure becomes part of the model's value."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.position = nnx.Embed(512, 32, rngs=rngs)
        self.qkv = nnx.Linear(32, 96, rngs=rngs)

    def __call__(self, tokens, positions, attend):
        x = self.embed(tokens) + self.position(positions)
        q, k, v = jnp.split(self.qkv(x)[:, :, None], 3, axis=-1)
        seen, entry = attend(q, k, v)
        return x + seen[:, :, 0], entry


@dataclasses.dataclass(frozen=True)
class Wrapped(dx.Model):
    graph: nnx.GraphDef

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        return cache.dense([(1, 32)], batch, capacity, jnp.float32)

    def apply(self, params, window, cache):
        net = nnx.merge(self.graph, params)
        attend = lambda q, k, v: cache.attend(0, q, k, v, window, scale=32 ** -0.5)
        hidden, entry = net(window.tokens, window.positions, attend)
        return dx.Out(hidden=hidden, entries=[entry], head=net.embed.attend)


graph, params = nnx.split(Net(nnx.Rngs(0)))
split = dx.LM(model=Wrapped(graph), params=params, vocab_size=64)
out = dx.generate(split, prompts, max_new_tokens=8)


@dataclasses.dataclass(frozen=True)
class Capped(AroundModel):
    cap: float = 30.0

    def apply(self, params, window, cache):
        out = self.base.apply(params, window, cache)
        head = lambda hidden: self.cap * jnp.tanh(out.head(hidden) / self.cap)
        return dataclasses.replace(out, head=head)


capped = dataclasses.replace(target, model=Capped(target.model))
least = dx.generate(capped, [[5, 6, 7]], max_new_tokens=8)
assert least.tokens.tolist() == dx.generate(target, [[5, 6, 7]], max_new_tokens=8).tokens.tolist()     # the same order
