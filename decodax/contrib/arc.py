"""Compressed contexts for a decoder: an ARC-Encoder with its weights and tokenizer (Pilchen et al., 2025).

>>> encoder = load(path)                                                                       # doctest: +SKIP
>>> inputs = encoder.read(lm, [[CompressedContext(document), question]])                       # doctest: +SKIP
>>> dx.generate(lm, **inputs)                                                                  # doctest: +SKIP

The decoder does not change. It gets the vectors of a context in place of token embeddings, so that every algorithm,
policy and cache works with them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.progress import bar
from decodax.common.registry import FUNCTIONS
from decodax.common.struct import short
from decodax.contrib.arc_files import read_arc, write_arc
from decodax.core.memory import power
from decodax.core.types import embeddings
from decodax.io.load import LM
from decodax.io.prompts import spell
from decodax.io.text import Tokenizer
from decodax.models import Embeddings, Transformer
from decodax.models.arc_encoder import ArcEncoder, End, llama_shaped
from decodax.models.transformer import Weights

Text = str | Sequence[int]

TOGETHER = 8
"""The number of texts that are encoded in one call."""


@dataclasses.dataclass(frozen=True)
class CompressedContext:
    """A part of a prompt that the decoder gets as vectors: a text, or token ids of the encoder's vocabulary."""

    text: Text


@dataclasses.dataclass(frozen=True)
class Encoder:
    """An ARC-Encoder ready to encode.

    Attributes:
        model: the network.
        params: the weights.
        tokenizer: the encoder's own tokenizer, which may differ from the decoder's; None if contexts are token ids.
    """

    __repr__ = short

    model: ArcEncoder
    params: Weights
    tokenizer: Tokenizer | None = None

    def read(self, lm: LM, prompts: Sequence[Sequence[Text | CompressedContext]], *, chunk: int | None = None,
             end: End | None = "cont") -> dict[str, Any]:
        """Returns the arguments `prompts` and `inputs` of `decodax.generate`, `stream` or `score`.

        Args:
            lm: the decoder.
            prompts: the parts of each prompt in order: `CompressedContext`s, and texts or token ids that the decoder
                reads itself. A text at the start gets the decoder's BOS token if its tokenizer adds one; later texts
                get none.
            chunk: the maximum number of tokens that are encoded together; longer contexts are encoded in pieces, and
                their vectors are concatenated.
            end: the trained vector after each context: "cont" asks for a continuation, "rec" for a repetition of the
                context.

        Raises:
            ValueError: a context has no tokens or has a token id outside the encoder's vocabulary, the encoder is for
                decoders of another width, or the last part of a prompt is not a text.
        """
        if not isinstance(lm.model, Transformer) or lm.model.config.width != self.model.out:
            width = f" of width {lm.model.config.width}" if isinstance(lm.model, Transformer) else ""
            raise ValueError(f"lm: got a {type(lm.model).__name__}{width}, takes a Transformer of width "
                             f"{self.model.out} for this encoder")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk: got {chunk}, takes at least 1, or None")
        rows = [[part if isinstance(part, CompressedContext) else _ids(lm, part, f"prompts[{i}]", special=j == 0)
                 for j, part in enumerate(row)] for i, row in enumerate(prompts)]
        for i, row in enumerate(rows):
            if not row or not row[-1] or isinstance(row[-1], CompressedContext):
                raise ValueError(f"prompts[{i}]: takes as its last part a text that is not empty, which the decoder "
                                 "reads after its contexts")
        vectors = iter(self.vectors([part.text for row in rows for part in row if isinstance(part, CompressedContext)],
                                    chunk=chunk, end=end))
        ids: list[list[int]] = []
        values: list[list[tuple[int, np.ndarray]]] = []
        for row in rows:
            own: list[int] = []
            places: list[tuple[int, np.ndarray]] = []
            for part in row:
                if isinstance(part, CompressedContext):
                    read = next(vectors)
                    places += [(len(own) + j, vector) for j, vector in enumerate(read)]
                    own += [0] * len(read)
                else:
                    own += part
            ids.append(own)
            values.append(places)
        longest = power(max((places[-1][0] + 1 for places in values if places), default=1))
        array: Any = np.zeros((len(ids), longest, self.model.out), np.float32)
        given: Any = np.zeros((len(ids), longest), bool)
        for i, places in enumerate(values):
            for at, vector in places:
                array[i, at], given[i, at] = vector, True
        return {"prompts": ids, "inputs": Embeddings(values=array, given=given)}

    def vectors(self, texts: Sequence[Text], *, chunk: int | None = None, end: End | None = "cont"
                ) -> list[np.ndarray]:
        """Returns for each text the vectors that the decoder gets in its place, `f32[M, D]`: one for every few tokens
        (`ArcEncoder.pool`), and the end vector. `chunk` and `end` are as in `read`."""
        pieces: list[list[int]] = []
        owners: list[int] = []
        for i, text in enumerate(texts):
            ids = self._ids(text, f"context {i}")
            size = chunk or len(ids)
            parts = [ids[start:start + size] for start in range(0, len(ids), size)]
            pieces, owners = pieces + parts, owners + [i] * len(parts)
        found: list[list[np.ndarray]] = [[] for _ in texts]
        for start in range(0, len(pieces), TOGETHER):
            some = pieces[start:start + TOGETHER]
            tokens = np.zeros((power(len(some)), max(power(max(map(len, some))), 16)), np.int32)
            for row, piece in zip(tokens, some, strict=False):
                row[:len(piece)] = piece
            lengths = np.array([*map(len, some), *[1] * (len(tokens) - len(some))], np.int32)
            values, counts = map(np.asarray, _encoded(self.model, self.params, tokens, lengths))
            for owner, own, count in zip(owners[start:start + TOGETHER], values, counts, strict=False):
                found[owner].append(own[:count])
        if end is not None and end in self.model.ends:
            last = np.asarray(self.model.bridge(self.params["bridge"], self.params[end]), np.float32)
            for own in found:
                own.append(last)
        return [np.concatenate(own) for own in found]

    def _ids(self, text: Text, name: str) -> list[int]:
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError(f"{name}: got text, but this encoder has no tokenizer; give token ids")
            text = self.tokenizer.encode(text, add_special_tokens=False)
        ids, vocab = [int(token) for token in text], self.model.config.vocab
        if not ids:
            raise ValueError(f"{name}: is empty, takes at least one token")
        if wrong := [token for token in ids if not 0 <= token < vocab]:
            raise ValueError(f"{name}: got token id {wrong[0]}, takes 0 to {vocab - 1}")
        return ids

    def save(self, path: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None) -> None:
        """Writes a directory in the layout of the released encoders, with the tokenizer's file.

        Args:
            path: the directory.
            dtype: dtype of the stored weights; None keeps theirs.
        """
        write_arc(Path(path), self.model, self.params, dtype)
        if self.tokenizer is not None:
            self.tokenizer.backend.save(str(Path(path) / "tokenizer.json"))


def load(path: str | os.PathLike[str], *, tokenizer: Tokenizer | None = None,
         backbone: str | os.PathLike[str] | None = None, decoder: int = 0,
         dtype: jax.typing.DTypeLike | None = None) -> Encoder:
    """Loads an encoder that `Encoder.save` wrote, or one of the authors' (kyutai-labs/ARC-Encoder).

    Args:
        path: a directory with `config.json` and `model.safetensors`, or a checkpoint of the authors' training.
        tokenizer: the encoder's tokenizer; default that of `tokenizer.json` in the directory, if the file exists.
        backbone: the directory of the encoder's backbone, which a checkpoint of their training needs.
        decoder: the index of the decoder, for an encoder that was trained for several.
        dtype: dtype of the weights; None keeps the stored one.

    Raises:
        ValueError: a file or tensor is missing or has another shape, or an option is not supported; the message names
            it.
    """
    root = Path(path)
    model, params = read_arc(root, None if backbone is None else Path(backbone), decoder, dtype)
    if tokenizer is None and (root / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_dir(root)
    return Encoder(model, params, tokenizer)


def begin(lm: LM, decoder: LM | None = None, *, layers: int | None = None, pool: int = 8, hidden: int | None = 2048,
          seed: int = 0) -> Encoder:
    """Returns an untrained encoder: the first layers of a model, with a new bridge, which maps the encoder's states to
    the decoder's embeddings.

    Args:
        lm: a Llama, from whose weights the encoder starts.
        decoder: the model that will read the vectors; None: `lm`.
        layers: number of layers. None: all but the last two, as in the authors' encoders, or all if there are at most
            four.
        pool: number of tokens for each vector, as in `ArcEncoder`.
        hidden: number of hidden channels of the bridge, as in `ArcEncoder`.
        seed: seed of the bridge's weights.

    Raises:
        ValueError: the model is not a Llama, or `layers` is out of range.
    """
    if not isinstance(lm.model, Transformer) or not llama_shaped(lm.model.config):
        raise ValueError("lm: takes a Llama")
    config = lm.model.config
    depth = len(config.layers)
    count = (depth if depth <= 4 else depth - 2) if layers is None else layers
    if not 1 <= count <= depth:
        raise ValueError(f"layers: got {layers}, takes 1 to {depth}")
    rope = config.layers[0].rope
    assert rope is not None
    layer = dataclasses.replace(config.layers[0], rope=dataclasses.replace(rope, interleaved=True))
    target = lm if decoder is None else decoder
    width = embeddings(target.model, target.params, jnp.zeros((1, 1), jnp.int32)).shape[-1]
    model = ArcEncoder(dataclasses.replace(config, layers=(layer,) * count), out=width, pool=pool, hidden=hidden)
    params = model.of_decoder(lm.params, jax.random.key(seed))
    if not rope.interleaved:
        # The files store rotated pairs as neighbours, so queries and keys are reordered once, here.
        params = {**params, "layers": {i: {**own, "attn": {**own["attn"], **{
            name: {"kernel": _paired(own["attn"][name]["kernel"], config.head_dim)} for name in ("q", "k")}}}
            for i, own in params["layers"].items()}}
    return Encoder(model, params, lm.tokenizer)


@FUNCTIONS.register("contrib.arc.fit",
                    "ARC-Encoder: learning compressed text representations for large language models",
                    "Pilchen et al. 2025", "an encoder of contexts into few vectors that a decoder reads")
def fit(encoder: Encoder, lm: LM, texts: Sequence[Sequence[int]], *, size: int = 128, steps: int = 1000,
        batch: int = 16, continuation: float = 0.8, rate: float = 1e-5, bridge_rate: float = 5e-5, warmup: int = 100,
        decay: float = 0.1, seed: int = 0, progress: bool = False) -> Encoder:
    """Trains an encoder through a decoder that does not change, and returns it (needs `decodax[train]`).

    A text of `2 size` tokens consists of a context and its continuation. The decoder reads the vectors of the context,
    an end, and then either the continuation ("cont") or the context itself again ("rec"). The loss is the decoder's
    mean cross-entropy over these tokens except the first. All texts of a batch use the same end. The optimizer is AdamW
    with one rate for the encoder and one for the bridge; the rates rise for `warmup` steps and then fall along a
    cosine. Gradients are clipped to a norm of 1.

    Args:
        encoder: the encoder to start from.
        lm: the decoder.
        texts: token ids of a vocabulary that encoder and decoder share; texts shorter than `2 size` are ignored.
        size: the number of tokens of a context. The authors' texts have 256 tokens in total.
        steps: the number of steps; the authors take 80000 on several devices.
        batch: the number of texts in a step; the authors take 16.
        continuation: the share of batches with the end "cont", from 0 to 1.
        rate: the highest learning rate of the encoder.
        bridge_rate: the highest learning rate of the bridge.
        warmup: the number of steps for which the rates rise.
        decay: weight decay.
        seed: seed of the batches.
        progress: whether to show a progress bar.

    Raises:
        ValueError: no text is long enough, a number is out of range, or the decoder has another width or vocabulary.
    """
    model, decoder = encoder.model, lm.model
    if not isinstance(decoder, Transformer) or decoder.config.width != model.out:
        raise ValueError(f"lm: takes a Transformer of width {model.out} for this encoder")
    if decoder.config.vocab != model.config.vocab:
        raise ValueError(f"lm: got a vocabulary of {decoder.config.vocab}, takes the encoder's {model.config.vocab}")
    if min(size, batch) < 2 or steps < 1 or not 0 <= continuation <= 1 or warmup < 0:
        raise ValueError(f"size, batch, steps, continuation, warmup: got {size}, {batch}, {steps}, {continuation} and "
                         f"{warmup}, takes at least 2 for size and batch, at least 1 step, a share from 0 to 1, and at "
                         "least 0 for warmup")
    starts = [(i, at) for i, text in enumerate(texts) for at in range(0, len(text) - 2 * size + 1, size)]
    if not starts:
        raise ValueError(f"texts: takes at least one with {2 * size} tokens or more")
    import optax  # an optional dependency

    def schedule(most: float) -> Any:
        return optax.warmup_cosine_decay_schedule(0.0, most, min(warmup, steps - 1), max(steps, 2))

    of = {"bridge": optax.adamw(schedule(bridge_rate), weight_decay=decay),
          "encoder": optax.adamw(schedule(rate), weight_decay=decay)}
    label = lambda params: {name: "bridge" if name == "bridge" else "encoder" for name in params}
    way = optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(of, label))

    @jax.jit
    def step(params: Weights, state: Any, tokens: Array, goes_on: Array) -> tuple[Weights, Any, Array]:
        cost, slope = jax.value_and_grad(lambda p: loss(model, decoder, p, lm.params, tokens, goes_on))(params)
        change, state = way.update(slope, state, params)
        return optax.apply_updates(params, change), state, cost

    random = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), encoder.params)
    state = way.init(params)
    with bar(progress, "training the encoder", steps) as report:
        for i in range(steps):
            some = [starts[j] for j in random.integers(0, len(starts), batch)]
            tokens = np.array([texts[which][at:at + 2 * size] for which, at in some], np.int32)
            params, state, _ = step(params, state, tokens, bool(random.random() < continuation))
            report(i + 1)
    return dataclasses.replace(encoder, params=params)


def loss(model: ArcEncoder, decoder: Transformer, params: Weights, weights: Weights, tokens: Array, goes_on: Array
         ) -> Array:
    """Returns the decoder's mean cross-entropy in nats, `f32[]`, after the vectors of the first half of a text.

    Args:
        model: the encoder.
        decoder: the decoder.
        params: the encoder's weights.
        weights: the decoder's weights.
        tokens: the texts, `i32[B, 2 T]`.
        goes_on: `bool[]`; True: the decoder predicts the second half; False: the first half again.
    """
    B, T = tokens.shape[0], tokens.shape[1] // 2
    lengths = jnp.full(B, T, jnp.int32)
    one = lambda end: model.apply(params, tokens[:, :T], lengths, end)[0]
    values = jax.lax.cond(goes_on, lambda: one("cont"), lambda: one("rec"))
    text = jnp.where(goes_on, tokens[:, T:], tokens[:, :T])
    M = values.shape[1]
    given = Embeddings(values=jnp.pad(values, ((0, 0), (0, T), (0, 0))),
                       given=jnp.broadcast_to(jnp.arange(M + T) < M, (B, M + T)))
    hidden, head = decoder.features(weights, jnp.pad(text, ((0, 0), (M, 0))), inputs=given)
    logits = jax.nn.log_softmax(head(hidden[:, M:-1]))
    return -jnp.take_along_axis(logits, text[:, 1:, None], -1).mean()


@functools.partial(jax.jit, static_argnums=0)
def _encoded(model: ArcEncoder, params: Weights, tokens: Array, lengths: Array) -> tuple[Array, Array]:
    values, counts = model.apply(params, tokens, lengths)
    return values.astype(jnp.float32), counts


def _paired(kernel: Array, width: int) -> Array:
    """Converts a query or key kernel from rotary pairs in two halves of a head to adjacent pairs."""
    halves = kernel.reshape(kernel.shape[0], -1, 2, width // 2)
    return halves.swapaxes(-1, -2).reshape(kernel.shape)


def _ids(lm: LM, text: Text, name: str, special: bool) -> list[int]:
    return spell(lm, text, name, special) if isinstance(text, str) else [int(token) for token in text]
