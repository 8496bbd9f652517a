"""Token healing: continues prompts that end within a token.

A prompt that ends inside of what would be a longer token is a boundary that the model has not seen: after `http:` a
model that knows `://` as one token finds `//` unlikely. So the last tokens are removed, and one of all ways to write
their text again, the *covers*, is drawn: all tokens of a cover except the last lie inside of the text, and the last may
extend beyond it.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.common.registry import FUNCTIONS
from decodax.common.struct import short
from decodax.core.memory import power
from decodax.core.mesh import on_mesh
from decodax.core.window import causal
from decodax.engine.methods import model
from decodax.io.load import LM

MOST = 1024
"""Largest number of beginnings of covers."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextVocabulary:
    """Tokens by their bytes.

    Attributes:
        texts: bytes of the tokens, sorted.
        ids: ids in the same order.
        longest: largest number of bytes of a token.
    """

    texts: list[bytes]
    ids: np.ndarray
    longest: int

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> TextVocabulary:
        """Sorts the tokens with the given bytes."""
        found = sorted((text, i) for i, text in enumerate(token_bytes) if text)
        return cls([text for text, _ in found], np.array([i for _, i in found]), max(len(t) for t, _ in found))

    def beginning(self, text: bytes) -> np.ndarray:
        """Returns the tokens that begin with a text."""
        low = bisect.bisect_left(self.texts, text)
        high = bisect.bisect_left(self.texts, text + b"\xff" * self.longest + b"\xff")
        return self.ids[low:high]

    def inside(self, text: bytes) -> list[tuple[int, bytes]]:
        """Returns the tokens that are proper prefixes of a text, with their bytes."""
        found = []
        for length in range(1, min(len(text) - 1, self.longest) + 1):
            at = bisect.bisect_left(self.texts, text[:length])
            while at < len(self.texts) and self.texts[at] == text[:length]:
                found.append((int(self.ids[at]), self.texts[at]))
                at += 1
        return found


def covers(vocabulary: TextVocabulary, text: bytes) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Returns all covers of a text: the tokens before the last, and the possible last tokens.

    Raises:
        ValueError: there are more than `MOST` beginnings.
    """
    found: list[tuple[tuple[int, ...], np.ndarray]] = []
    todo: list[tuple[tuple[int, ...], bytes]] = [((), text)]
    while todo:
        path, rest = todo.pop()
        if len(ends := vocabulary.beginning(rest)):
            found.append((path, ends))
        todo += [((*path, token), rest[len(part):]) for token, part in vocabulary.inside(rest)]
        if len(found) + len(todo) > MOST:
            raise ValueError(f"tokens: {text!r} can be written in more than {MOST} ways; takes fewer")
    return found


@functools.partial(jax.jit, static_argnums=0)
def _behind(net: Any, params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Returns log-probabilities of the token after `length` tokens (`i32[B]`): `f32[B, V]`."""
    live = jnp.arange(tokens.shape[1]) < length[:, None]
    cache = net.init_cache(tokens.shape[0], tokens.shape[1], params=params)
    out = net.apply(params, causal(tokens, jnp.zeros(len(tokens), jnp.int32), live), cache)
    last = jnp.take_along_axis(out.hidden, length[:, None, None] - 1, 1)
    return jax.nn.log_softmax(out.head(last)[:, 0])


def _next(lm: LM, texts: Sequence[Sequence[int]], rows: int = 8) -> np.ndarray:
    """Returns log-probabilities of the token after each text: `f64[n, V]`."""
    width = power(max(map(len, texts)))
    out = []
    for i in range(0, len(texts), rows):
        some = [*texts[i:i + rows], *[texts[i]] * max(0, i + rows - len(texts))]
        tokens = np.zeros((rows, width), np.int32)
        for row, ids in zip(tokens, some, strict=True):
            row[:len(ids)] = ids
        with on_mesh(lm.mesh):
            out.append(np.asarray(_behind(lm.model, lm.params, tokens, np.array([len(x) for x in some], np.int32))))
    return np.concatenate(out)[:len(texts)].astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Covered:
    """The covers of a text after a prefix.

    Attributes:
        paths, ends: the result of `covers`.
        log_probs: log-probabilities of the whole covers, a list of `f64[len(ends)]`.
    """

    __repr__ = short

    paths: list[tuple[int, ...]]
    ends: list[np.ndarray]
    log_probs: list[np.ndarray]

    @property
    def log_prob(self) -> float:
        """Log-probability that a text after the prefix begins with these bytes."""
        every = np.concatenate(self.log_probs)
        top = every.max()
        return float(top + np.log(np.exp(every - top).sum()))


def covered(lm: LM | Any, prefix: Sequence[int], text: bytes) -> Covered:
    """Returns the covers of `text` after a prefix, with their log-probabilities (Phan et al., 2024).

    The sum of their probabilities is that of the bytes: it turns a model of tokens into a model of bytes, without the
    bias of one tokenization.

    Raises:
        ValueError: a model without a tokenizer, an empty prefix, no cover, or too many.
    """
    lm = model(lm)
    if lm.tokenizer is None:
        raise ValueError("lm: got a model without a tokenizer, takes one with it, since tokens need bytes")
    if not len(prefix) or not text:
        raise ValueError("prefix and text: take at least one token and one byte")
    found = covers(_vocabulary(lm), text)
    if not found:
        raise ValueError(f"text: got {text!r}, takes bytes that the model's tokens can write")
    known: dict[tuple[int, ...], int] = {path: i for i, (path, _) in enumerate(found)}
    # The prefixes of a path are paths too, unless no token can follow as the last one.
    every = sorted({path[:k] for path, _ in found for k in range(len(path) + 1)} | set(known), key=len)
    place = {path: i for i, path in enumerate(every)}
    table = _next(lm, [[*prefix, *path] for path in every])
    total: dict[tuple[int, ...], float] = {(): 0.0}
    for path in every[1:]:
        total[path] = total[path[:-1]] + float(table[place[path[:-1]], path[-1]])
    return Covered([path for path, _ in found], [ends for _, ends in found],
                   [total[path] + table[place[path], ends] for path, ends in found])


@functools.lru_cache(maxsize=4)
def _sorted(tokenizer: Any, size: int) -> TextVocabulary:
    return TextVocabulary.of(tokenizer.token_bytes(True)[:size])


def _vocabulary(lm: LM) -> TextVocabulary:
    return _sorted(lm.tokenizer, lm.vocab_size)


@dataclasses.dataclass(frozen=True)
class Healed:
    """Prompts whose end has been written again.

    Attributes:
        ids: the tokens of each prompt, for `generate`.
        beyond: the text of the last token beyond the prompt.
        log_prob: log-probability of the removed text, over all its covers, given the text before.
    """

    __repr__ = short

    ids: list[list[int]]
    beyond: list[str]
    log_prob: np.ndarray


@FUNCTIONS.register("search.heal", "Understanding and Mitigating Tokenization Bias in Language Models",
                    "Phan et al. 2024", "the prompt's last tokens are drawn anew among all that cover its text")
def heal(lm: LM | Any, prompts: str | Sequence[str], tokens: int = 1, temperature: float = 1.0,
         seed: int = 0) -> Healed:
    """Removes the last tokens of prompts, and draws one of their covers by its probability.

    The model's continuation of `ids`, with `beyond` before it, is distributed as texts that begin with the prompt,
    given the tokens that were kept (token healing without its bias: Phan et al., 2024). Masks that only allow fitting
    tokens (`regex`, transformers' `token_healing`) have another distribution.

    >>> import decodax as dx
    >>> healed = dx.search.heal("pycode", "import os.pa")                              # doctest: +SKIP
    >>> dx.generate("pycode", healed.ids).text                                        # doctest: +SKIP

    Args:
        lm: the model.
        prompts: one or several texts.
        tokens: number of tokens that are removed.
        temperature: temperature of the choice among covers; 0: the most likely one.
        seed: seed of the choice.

    Raises:
        ValueError: as in `covered`, or a prompt that has no more tokens than are removed.
    """
    lm = model(lm)
    if lm.tokenizer is None:
        raise ValueError("lm: got a model without a tokenizer, takes one with it, since tokens need bytes")
    if tokens < 1 or temperature < 0:
        raise ValueError(f"tokens and temperature: got {tokens} and {temperature}, take 1 or more, and 0 or more")
    given, size = [prompts] if isinstance(prompts, str) else list(prompts), lm.tokenizer.token_bytes(True)
    out, beyond, sums = [], [], []
    for p, prompt in enumerate(given):
        ids = lm.tokenizer.encode(prompt)
        if lm.bos is not None and len(ids) == tokens and ids[0] != lm.bos:
            ids = [lm.bos, *ids]
        if len(ids) <= tokens:
            raise ValueError(f"prompts[{p}]: got {len(ids)} tokens, takes more than the {tokens} that are removed")
        text = b"".join(size[t] for t in ids[-tokens:])
        found = covered(lm, ids[:-tokens], text)
        every = np.concatenate(found.log_probs)
        which = int(every.argmax())
        if temperature > 0:
            with np.errstate(over="ignore"):        # for entries far below the largest
                w = np.exp((every - every.max()) / temperature)
            which = int(np.random.default_rng([seed, p]).choice(len(every), p=w / w.sum()))
        row = int(np.searchsorted(np.cumsum([len(x) for x in found.ends]), which, side="right"))
        end = int(np.concatenate(found.ends)[which])
        cover = [*found.paths[row], end]
        out.append([*ids[:-tokens], *cover])
        beyond.append(b"".join(size[t] for t in cover)[len(text):].decode("utf-8", "replace"))
        sums.append(found.log_prob)
    return Healed(out, beyond, np.array(sums))
