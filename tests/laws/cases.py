"""What the laws run over: models, algorithms, policies, and one way to decode with them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.algorithms.diffusion import Adapter, Blocks, MaskedDiffusion, Quota, Random
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Proposal, Rejection, Speculative, chain
from decodax.algorithms.speculative.drafts import PromptLookup
from decodax.algorithms.speculative.source import Answer, Draft, Source
from decodax.core import drivers, keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import Params
from decodax.io.load import LM
from decodax.io.text import Tokenizer
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from tests.laws.toy import Toy
from tests.small_tokenizers import of_words

VOCABULARY = 16
MASK = VOCABULARY - 1


@functools.cache
def model(name: str) -> tuple[Any, Any]:
    """A small model over 16 tokens and its weights."""
    if name == "toy":
        return Toy(VOCABULARY), Toy(VOCABULARY).init_params(0)
    if name == "toy-draft":     # like the toy, and less sure
        return Toy(VOCABULARY), jax.tree.map(lambda x: 0.8 * x, Toy(VOCABULARY).init_params(0))
    config = llama(vocab=VOCABULARY, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256)
    if name == "sliding":
        layer = dataclasses.replace(config.layers[0], sliding=5)
        config = dataclasses.replace(config, layers=(layer, config.layers[1]))
    network = Transformer(config)
    # fresh weights of 0.02 give flat logits; these give distributions with a shape
    return network, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, network.init_params(jax.random.key(1)))


WORDS = "a </s> b c d e f g h ab cd abc de gh fa ha", "h g f e </s> d c b a bc bcd ab ef ha ga cb"
"""Vocabularies of the target and of the draft model, with other texts for the same ids."""


@functools.cache
def lm(which: str) -> LM:
    """A model of `model` with a tokenizer of words."""
    network, weights = model(which)
    return LM(model=network, params=weights, vocab_size=VOCABULARY,
              tokenizer=Tokenizer(of_words(WORDS[which in ("sliding", "toy-draft")], "</s>")))


MODELS = ["toy", "llama", "sliding"]

LEFT_TO_RIGHT = {
    "lookup": Speculative(PromptLookup(length=4)),
    "lookup-bigrams": Speculative(PromptLookup(length=2, max_ngram=2, min_ngram=2)),
    "lookup-long": Speculative(PromptLookup(length=9, max_ngram=4)),
}

ALGORITHMS = {
    "autoregressive": Autoregressive(),
    "lookup": LEFT_TO_RIGHT["lookup"],
    "lookup-rejection": Speculative(PromptLookup(length=4), Rejection()),
    "llada": MaskedDiffusion(Adapter(MASK), Blocks(8)),
    "llada-quota": MaskedDiffusion(Adapter(MASK), Blocks(8), unmask=Quota(3)),
    "llada-random-shifted": MaskedDiffusion(Adapter(MASK, shift=True), Blocks(4), Random()),
}

POLICIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": dict(temperature=0.9),
    "truncated": dict(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02),
    "penalised": dict(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    "greedy-penalised": dict(repetition_penalty=1.6),
    "n-gram": dict(temperature=1.0, no_repeat_ngram_size=2, bad_words_ids=[[3], [4, 5]]),
    "stateful": dict(temperature=1.0, mirostat_tau=2.0, mirostat_eta=0.2),
    "together": dict(temperature=0.7, repetition_penalty=1.3, bad_words_ids=[[2]], min_p=0.05,
                     sequence_bias={(6, 7): 3.0}, xtc_probability=0.5, xtc_threshold=0.1),
}
ANY_ORDER = ["greedy", "sampled", "truncated", "penalised", "greedy-penalised"]
"""Policies that a canvas can take: they need nothing of the past, or a bag of it."""


def prompts(rows: int, longest: int = 24, seed: int = 0) -> list[list[int]]:
    """Ragged prompts, half of them with repeats that a lookup finds."""
    draw = np.random.default_rng(seed)
    out = []
    for i in range(rows):
        length = int(draw.integers(1, longest + 1))
        ids = draw.integers(0, MASK, length)
        if i % 2:
            ids = np.resize(ids[:max(length // 3, 1)], length)
        out.append(ids.tolist())
    return out


def padded(ids: list[list[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows of a buffer of `size` tokens, and their lengths."""
    tokens = np.zeros((len(ids), size), np.int32)
    for row, given in zip(tokens, ids, strict=True):
        row[:len(given)] = given
    return tokens, np.array([len(row) for row in ids], np.int32)


def start(alg: Any, which: str, ids: list[list[int]], policy: dict[str, Any], *, new: Any = 12, size: int = 64,
          seed: Any = 7, request: Any = None, eos: Any = None, width: int = 16, top_logprobs: int | None = None,
          minimum: Any = 0, draft: Any = None) -> tuple[Any, Params, Any, State]:
    """A prefilled state with everything that running it takes."""
    network, weights = model(which)
    params = Params(weights, draft)
    tokens, lengths = padded(ids, size)
    each = lambda x, dtype: np.broadcast_to(np.asarray(x, dtype), len(ids)).copy()
    chain = build(len(ids), vocab_size=VOCABULARY, eos_token_id=eos, **policy)
    s = drivers.begin(alg, network, params, chain, jnp.asarray(tokens), lengths, size=size, max_new=each(new, np.int32),
                      min_new=each(minimum, np.int32), seed=each(seed, np.uint32), top_logprobs=top_logprobs,
                      request=each(np.arange(len(ids)) if request is None else request, np.uint32))
    return network, params, chain, drivers.prefill(alg, network, params, s, width=width)


def decode(alg: Any, which: str, ids: list[list[int]], policy: dict[str, Any], **options: Any) -> State:
    """Runs prompts to the end."""
    network, params, chain, s = start(alg, which, ids, policy, **options)
    return drivers.advance(alg, network, params, chain, s, jnp.int32(500))


def texts(s: State) -> list[list[int]]:
    """The new tokens of each row."""
    tokens, begin, end = (np.asarray(x) for x in (s.tokens, s.prompt_length, s.length))
    return [row[i:j].tolist() for row, i, j in zip(tokens, begin, end, strict=True)]


@dataclasses.dataclass(frozen=True)
class Sampled(Draft):
    """A draft that draws from a distribution of its own, which depends on the newest token, and reports it."""

    length: int = 3

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: str) -> tuple[Proposal, Any]:
        table = jax.nn.log_softmax(jax.random.normal(jax.random.key(5), (VOCABULARY, VOCABULARY)) * 1.5)
        tokens, log_q, last = [], [], s.newest
        for i in range(self.length):
            q = table[last]
            key = jax.vmap(lambda k, p: keys.at(k, p, Purpose.DRAFT))(s.key, s.length + i)
            last = jax.vmap(lambda k, q: jax.random.categorical(k, q, mode="high"))(key, q).astype(jnp.int32)
            tokens.append(last)
            log_q.append(q)
        count = jnp.full(s.batch, self.length, jnp.int32)
        return chain(jnp.stack(tokens, 1), count, jnp.stack(log_q, 1)), state


@dataclasses.dataclass(frozen=True)
class Scripted(Draft):
    """A draft that knows the text (a tuple of rows of token ids): what it proposes is always right."""

    script: tuple[tuple[int, ...], ...]
    length: int = 3

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: str) -> tuple[Proposal, Any]:
        text = jnp.asarray(self.script, jnp.int32)
        index = (s.length - s.prompt_length)[:, None] + jnp.arange(self.length)
        tokens = jnp.take_along_axis(text, jnp.minimum(index, text.shape[1] - 1), 1)
        return chain(tokens, jnp.full(s.batch, self.length, jnp.int32)), state


@dataclasses.dataclass(frozen=True)
class Table(Source):
    """A source whose distribution depends on the last token alone."""

    spread: float = 1.5

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Any]:
        return state, Answer(self.logits_after(s.newest[:, None]))

    def extend(self, params: Params, s: State, state: Any, level: Any) -> tuple[Any, Any]:
        return state, Answer(self.logits_after(level.tokens))

    def logits_after(self, tokens: Any) -> Any:
        return jax.random.normal(jax.random.key(5), (VOCABULARY, VOCABULARY))[tokens] * self.spread
