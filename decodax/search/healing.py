"""Token healing: continues prompts that end in the middle of a token.

If a prompt ends inside what would be one longer token, the model sees a token boundary that it has not seen in
training: after `http:`, a model that has a token `://` finds `//` unlikely. Token healing removes the last tokens of
the prompt and draws another way to tokenize their text, a *cover*. All tokens of a cover except the last lie inside the
text; the last token may extend beyond it.
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
    """A vocabulary sorted by the bytes of its tokens, for prefix searches.

    Attributes:
        texts: bytes of the tokens, sorted.
        ids: token ids in the same order.
        longest: number of bytes of the longest token.
    """

    texts: list[bytes]
    ids: np.ndarray
    longest: int

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> TextVocabulary:
        """Returns the vocabulary whose token `i` has the bytes `token_bytes[i]`; empty tokens are left out."""
        found = sorted((text, i) for i, text in enumerate(token_bytes) if text)
        return cls([text for text, _ in found], np.array([i for _, i in found]), max(len(t) for t, _ in found))

    def beginning(self, text: bytes) -> np.ndarray:
        """Returns the ids of the tokens that begin with `text`, which includes `text` itself."""
        low = bisect.bisect_left(self.texts, text)
        high = bisect.bisect_left(self.texts, text + b"\xff" * self.longest + b"\xff")
        return self.ids[low:high]

    def inside(self, text: bytes) -> list[tuple[int, bytes]]:
        """Returns the ids and bytes of the tokens that are proper prefixes of `text`."""
        found = []
        for length in range(1, min(len(text) - 1, self.longest) + 1):
            at = bisect.bisect_left(self.texts, text[:length])
            while at < len(self.texts) and self.texts[at] == text[:length]:
                found.append((int(self.ids[at]), self.texts[at]))
                at += 1
        return found


def covers(vocabulary: TextVocabulary, text: bytes) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Returns all covers of a text: the tokens before the last one, and all ids that the last one may be.

    Raises:
        ValueError: there are more than `MOST` different beginnings.
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
    """Returns log-probabilities of the next token after the first `length` tokens (`i32[B]`) of each row: `f32[B, V]`.
    """
    live = jnp.arange(tokens.shape[1]) < length[:, None]
    cache = net.init_cache(tokens.shape[0], tokens.shape[1], params=params)
    out = net.apply(params, causal(tokens, jnp.zeros(len(tokens), jnp.int32), live), cache)
    last = jnp.take_along_axis(out.hidden, length[:, None, None] - 1, 1)
    return jax.nn.log_softmax(out.head(last)[:, 0])


def _next(lm: LM, texts: Sequence[Sequence[int]], rows: int = 8) -> np.ndarray:
    """Returns log-probabilities of the next token after each text: `f64[n, V]`. The model runs on `rows` texts at a
    time."""
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
        paths: the tokens of each cover before its last one.
        ends: for each entry of `paths`, the ids that the last token may be.
        log_probs: for each entry of `paths`, the log-probabilities of the covers with each of its `ends`,
            `f64[len(ends)]`.
    """

    __repr__ = short

    paths: list[tuple[int, ...]]
    ends: list[np.ndarray]
    log_probs: list[np.ndarray]

    @property
    def log_prob(self) -> float:
        """Log-probability that the text after the prefix begins with the covered bytes: the sum over all covers."""
        every = np.concatenate(self.log_probs)
        top = every.max()
        return float(top + np.log(np.exp(every - top).sum()))


def covered(lm: LM | Any, prefix: Sequence[int], text: bytes) -> Covered:
    """Returns the covers of `text` after a prefix, with their log-probabilities (Phan et al., 2024).

    The sum of their probabilities is the probability of the bytes. It turns a model over tokens into a model over
    bytes, without the bias of a fixed tokenization.

    Args:
        lm: the model.
        prefix: token ids before the text.
        text: the bytes to cover.

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
    """The result of `heal`: prompts whose last tokens were drawn again.

    Attributes:
        ids: the token ids of each prompt, an input of `generate`.
        beyond: the part of the last token's text that extends beyond the prompt. The whole answer is this text and the
            continuation of `ids`.
        log_prob: log-probability of the removed text after the kept tokens, summed over all its covers.
    """

    __repr__ = short

    ids: list[list[int]]
    beyond: list[str]
    log_prob: np.ndarray


@FUNCTIONS.register("search.heal", "Understanding and Mitigating Tokenization Bias in Language Models",
                    "Phan et al. 2024", "the prompt's last tokens are drawn anew among all that cover its text")
def heal(lm: LM | Any, prompts: str | Sequence[str], tokens: int = 1, temperature: float = 1.0,
         seed: int = 0) -> Healed:
    """Removes the last tokens of prompts, and draws a cover of their text by its probability.

    `beyond`, followed by the model's continuation of `ids`, is distributed as the model's texts after the kept tokens,
    given that they begin with the removed text: token healing without the bias of a fixed tokenization (Phan et al.,
    2024). Constraints that only allow fitting tokens (`regex`, transformers' `token_healing`) sample another
    distribution.

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
