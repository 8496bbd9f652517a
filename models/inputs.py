"""Inputs of models beside tokens, for each row: embeddings, the text or audio of an encoder, adapters."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.memory import power
from decodax.core.types import Model
from decodax.core.window import take
from decodax.models.encoder_decoder.log_mel import log_mel


@struct
class Embeddings(Struct):
    """Inputs of a `Transformer`: embeddings that replace those of tokens at the first positions of each row.

    They may be a soft prompt or an image. The token ids at these positions are only visible to the sampling policy.

    Attributes:
        values: `f[B, T, D]`, with the scale of the rows of the embedding table.
        given: `bool[B, T]`, True where an embedding replaces the token's.
        beside_tokens: True if the prompt has meaningful token ids at these positions, too, such as image tokens.
    """

    beside_tokens: ClassVar[bool] = False
    values: Array
    given: Array

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Returns the embeddings `f[B, W, D]` at positions `i32[B, W]`, and `bool[B, W]`, True where there is one."""
        T = self.values.shape[1]
        index = jnp.minimum(positions, T - 1)
        return take(self.values, index), take(self.given, index) & (positions < T)


def check_tokens(needed: bool, inputs: Any) -> None:
    """Raises ValueError if layers need token ids (`needed`), and `inputs` are embeddings without token ids beside them,
    such as a soft prompt."""
    if needed and (isinstance(inputs, Array) or (isinstance(inputs, Embeddings) and not inputs.beside_tokens)):
        raise ValueError("inputs: got embeddings, takes tokens, by which this model chooses experts or finds n-grams")


class PaddedInputs(Struct, abc.ABC):
    """Inputs of rows that have different lengths and are padded to one width. With `batch_size`, rows of similar
    lengths run together, without the padding that only longer rows need."""

    @property
    @abc.abstractmethod
    def widths(self) -> np.ndarray:
        """`i64[B]`, the width that each row needs, rounded up so that few programs are compiled."""

    @abc.abstractmethod
    def cut(self, width: int) -> Self:
        """Returns the same rows padded to `width`, the largest of `widths` or more, and at most the present width."""


class ReadsText(Model):
    """A model that may have an encoder of texts."""

    @property
    @abc.abstractmethod
    def encodes(self) -> bool:
        """True if the inputs of each row are an `EncoderText`."""

    @property
    def source_vocab(self) -> int | None:
        """Number of token ids that the encoder has; None: those of the decoder."""
        return None


@struct
class EncoderText(PaddedInputs):
    """Inputs of an `EncoderDecoder`, and of a `Transformer` with prefix linear attention: the text of the encoder for
    each row.

    Attributes:
        tokens: `i32[B, T]`, left-aligned.
        length: `i32[B]`, number of tokens, at least 1.
    """

    tokens: Array
    length: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> EncoderText:
        """Makes the inputs from lists of token ids. They are padded to a width that texts of similar lengths share, so
        that few programs are compiled: a power of two from 16 to 128, then a multiple of 128."""
        if not len(rows) or not all(map(len, rows)):
            raise ValueError("rows: got a text without tokens, takes at least one token for each row")
        width = _rounded(max(map(len, rows)))
        tokens: Any = np.zeros((len(rows), width), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[:len(ids)] = ids
        length: Any = np.array([len(row) for row in rows], np.int32)
        return cls(tokens=tokens, length=length)

    @classmethod
    def read(cls, lm: Any, texts: str | Sequence[str], language: str | Sequence[str] | None = None) -> EncoderText:
        """Makes the inputs from texts, with the special tokens that the model's tokenizer adds.

        Args:
            lm: the result of `decodax.load`.
            texts: the texts.
            language: the token of their language, such as "deu_Latn" for NLLB, or one for each text. It replaces the
                language with which the tokenizer was saved.

        Raises:
            ValueError: the model has no encoder of texts or no tokenizer, or its tokenizer has no such token or marks
                no language.
        """
        return read_texts(lm, texts, language, "texts")

    @property
    def widths(self) -> np.ndarray:
        found: Any = np.array([_rounded(n) for n in np.asarray(self.length).tolist()], np.int64)
        return np.minimum(found, self.tokens.shape[1])

    def cut(self, width: int) -> Self:
        return self.replace(tokens=self.tokens[:, :width])


def _rounded(length: int) -> int:
    """Returns the width for texts of up to `length` tokens."""
    return max(power(length), 16) if length <= 128 else -(-length // 128) * 128


def read_texts(lm: Any, texts: Any, language: str | Sequence[str] | None, name: str) -> EncoderText:
    """Returns the inputs that `EncoderText.read` makes. `name` is the argument that holds the texts, for errors."""
    if not reads_text(lm.model):
        raise ValueError(f"{name}: got text, and {lm.name!r} has no encoder that reads it; a model with a decoder "
                         "alone takes its text in the prompt")
    texts = [texts] if isinstance(texts, str) else list(texts)
    if lm.tokenizer is None:
        raise ValueError(f"{name}: {lm.name!r} has no tokenizer that is read here; takes token ids: "
                         "EncoderText.of(tokenizer(texts).input_ids), with its tokenizer of transformers")
    tokenizer = lm.tokenizer.source or lm.tokenizer
    rows = [tokenizer.encode(text) for text in texts]
    if language is not None:
        each = [language] * len(rows) if isinstance(language, str) else list(language)
        rows = [_in_language(tokenizer, row, own) for row, own in zip(rows, each, strict=True)]
    return EncoderText.of(rows)


def reads_text(model: Model) -> bool:
    """Returns True if the inputs of the model are an `EncoderText`."""
    return isinstance(model, ReadsText) and model.encodes


def _in_language(tokenizer: Any, row: Sequence[int], language: str) -> list[int]:
    """Returns the token ids of a text with another token for its language."""
    own = tokenizer.backend.token_to_id(language)
    if own is None:
        raise ValueError(f"language: got {language!r}, which is no token of the tokenizer")
    named = {tokenizer.backend.token_to_id(text) for name, text in tokenizer.special_tokens.items()
             if isinstance(text, str) and name.endswith("_token")}
    around = tokenizer.encode("")       # the tokens that are added to every text
    marks = [i for i, token in enumerate(around) if token not in named]
    if len(marks) != 1:
        raise ValueError(f"language: got {language!r}, and the tokenizer marks no language of a text")
    at, ids = marks[0] if marks[0] == 0 else marks[0] - len(around), list(row)
    ids[at] = own
    return ids


class ReadsAudio(Model):
    """A model with an encoder that may read audio."""

    @property
    @abc.abstractmethod
    def frames(self) -> tuple[int, int] | None:
        """The number of features of a frame of audio, and the number of frames that the encoder reads at once; None if
        it reads text."""


@struct
class EncoderAudio(Struct):
    """Inputs of an `EncoderDecoder` that reads audio: the features of each row, such as log-mel spectrograms.

    Attributes:
        features: `f32[B, F, T]`, `F` features of `T` frames.
    """

    features: Array

    @classmethod
    def read(cls, lm: Any, audio: Any) -> EncoderAudio:
        """Makes the inputs from samples at 16 kHz, padded with silence or cut to what the model reads at once: 30
        seconds for Whisper. `decodax.front.transcribe` reads longer audio.

        Args:
            lm: the result of `decodax.load`, whose encoder reads audio.
            audio: samples from -1 to 1, one-dimensional, or a list of several.

        Raises:
            ValueError: an audio is not one-dimensional, or the model reads none.
        """
        frames = lm.model.frames if isinstance(lm.model, ReadsAudio) else None
        if frames is None:
            raise ValueError(f"lm: got {lm.name!r}, which reads no audio")
        rows = [audio] if np.ndim(audio[0]) == 0 else list(audio)
        features: Any = np.stack([log_mel(row, *frames) for row in rows])
        return cls(features=features)


@struct
class AdapterRows(Struct):
    """Inputs of a `Transformer` with several adapters: the adapter of each row; see `decodax.adapters`.

    Attributes:
        which: `i32[B]`, the adapter's number; 0 is none.
    """

    which: Array


def named(inputs: Any) -> str:
    """Returns a description of a model's `inputs` that are of a wrong type, for error messages: the name of their type,
    or "an array" for an array that is being traced."""
    return "an array" if isinstance(inputs, (Array, np.ndarray)) else f"a {type(inputs).__name__}"
