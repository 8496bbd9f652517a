"""Images in prompts: vectors of the user's own encoder at the image tokens, with the positions that the model was
trained with.

A model that sees images has an encoder, which decodax does not run, and a language model, which is a `Transformer`. The
encoder gives some vectors for an image, each of which belongs to one image token of the prompt. Three things differ
from a prompt of plain tokens:

- With M-RoPE ("Qwen2-VL", Wang et al., 2024) a position has three numbers: time, height and width. Each frequency of
  the rotary embedding belongs to one of them. Those of an image are its rows and columns; text has three equal numbers,
  and goes on after an image at the largest number so far plus one. In Hunyuan Hy4 each row of an image ends with a
  vector for the end of the line, which has a column of its own.
- With DeepStack (Meng et al., 2024; Qwen3-VL) the encoder gives further vectors, which are added to the residual stream
  after each of the first layers.
- In Gemma 3 the tokens of an image attend to one another in both directions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.cache import Dense
from decodax.cache.key_values import NoKeyValues
from decodax.cache.paged import PagedCache
from decodax.common.struct import static, struct
from decodax.core.cache import Cache
from decodax.core.window import Window, take
from decodax.models.blocks.options import Layer
from decodax.models.inputs import Embeddings
from decodax.models.rope import Rope

SECTIONS = {"qwen2_vl": (16, 24, 24), "qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20),
            "qwen3_vl_moe": (24, 20, 20), "qwen3_5": (11, 11, 10), "qwen3_5_moe": (11, 11, 10),
            "qwen4_exp": (11, 11, 10), "hy_v4_vl": (12, 10, 10)}
"""Number of frequencies for time, height and width in the families with M-RoPE, if `mrope_section` is missing."""

ADJACENT = ("qwen2_vl", "qwen2_5_vl")
"""Families with M-RoPE in which the frequencies of each number are adjacent; in the others they alternate."""

STEP = 32
"""Prompts whose images end within the same multiple of this many tokens share their programs, if images are read in
both directions."""


@struct
class Images(Embeddings):
    """Inputs of a `Transformer`: vectors that replace the embeddings of image tokens. `Images.of` makes them.

    Attributes:
        values: `f[B, T, D]`, the vector of each image token.
        given: `bool[B, T]`, True at image tokens.
        added: `f[B, T, K, D]`, what is added after each of the first `K` layers; None: nothing.
        places: `i32[B, T, 3]`, positions for the rotary embedding in time, height and width; None: the usual ones.
        offset: `i32[B]`, what is added to positions from `T` on; None: nothing.
        number: `i32[B, T]`, the image to which a token belongs, which is read in both directions, or -1; None: images
            are read from left to right.
        axes: static; for each frequency of the rotary embedding the index in the last axis of `places`.
        whole: static; number of first tokens that have to be read in one window, since images are read in both
            directions.
    """

    beside_tokens: ClassVar[bool] = True
    added: Array | None = None
    places: Array | None = None
    offset: Array | None = None
    number: Array | None = None
    axes: tuple[int, ...] | None = static(default=None)
    whole: int = static(default=0)

    @classmethod
    def of(cls, lm: Any, prompts: Sequence[Sequence[int]], embeddings: Sequence[Sequence[Any]], *,
           grids: Sequence[Sequence[Any]] | None = None, deepstack: Sequence[Sequence[Any]] | None = None,
           token: int | None = None) -> Self:
        """Places the vectors of images at the image tokens of prompts.

        The prompts have an image token for each vector, as the processors of transformers write them (`input_ids`).
        Vectors are taken in order.

        Args:
            lm: the loaded model, whose `config.json` says how it sees images. One that does not (a language model
                saved by itself, or made in memory) takes plain positions, and a `token`.
            prompts: token ids of each prompt, the same that are generated from.
            embeddings: for each prompt a list with `f[n, D]` for each of its images: the output of the encoder for the
                `n` image tokens of the image, after the projection to the model's width.
            grids: for each prompt a list with the grid of each image, time, height and width in patches (the rows of
                `image_grid_thw`); for models with M-RoPE, and only for these.
            deepstack: for each prompt a list with `f[K, n, D]` for each image: the vectors that are added after the
                first `K` layers; for models with DeepStack (Qwen3-VL), and only for these.
            token: id of the image token. None: as `config.json` says.

        Raises:
            ValueError: an argument is missing or not for this model, or numbers of vectors, tokens and patches differ.

        >>> import decodax as dx
        >>> lm = dx.load("pycode")
        >>> prompt = [7, 5, 5, 9]
        >>> images = Images.of(lm, [prompt], [[np.zeros((2, lm.model.config.width))]], token=5)
        >>> images.given[0].tolist()
        [False, True, True, False]
        """
        sight, config = _Sight.of(lm, token), lm.model.config
        rows = [np.asarray(row, np.int64) for row in prompts]
        for name, given, takes in (("grids", grids, sight.axes), ("deepstack", deepstack, sight.layers or None)):
            if (given is None) != (takes is None):
                raise ValueError(f"{name}: got {'none' if given is None else 'some'}, {lm.name!r} takes "
                                 f"{'none' if takes is None else 'them'}")
        for name, given in (("embeddings", embeddings), ("grids", grids), ("deepstack", deepstack)):
            if given is not None and len(given) != len(rows):
                raise ValueError(f"{name}: got {len(given)} lists for {len(rows)} prompts")
        longest = max(map(len, rows), default=1)
        T, B, D = 1 << (longest - 1).bit_length(), len(rows), config.width      # few sizes, so that few programs
        values, which = np.zeros((B, T, D), np.float32), np.zeros((B, T), bool)
        added = np.zeros((B, T, sight.layers, D), np.float32)
        places, offset = np.zeros((B, T, 3), np.int32), np.zeros(B, np.int32)
        number, end = np.full((B, T), -1, np.int32), 0
        for b, ids in enumerate(rows):
            vectors = [_array(f"embeddings[{b}]", x, (None, D)) for x in embeddings[b]]
            at = np.flatnonzero(ids == sight.token)
            if (count := sum(map(len, vectors))) != len(at):
                raise ValueError(f"embeddings: got {count} vectors for prompt {b}, which has {len(at)} image tokens "
                                 f"({sight.token})")
            which[b, at] = True
            parts = np.split(at, np.cumsum([len(x) for x in vectors])[:-1]) if vectors else []
            for i, (part, x) in enumerate(zip(parts, vectors, strict=True)):
                values[b, part] = x / np.float32(config.embed_scale)        # the model scales all embeddings
                number[b, part] = i
                end = max(end, int(part[-1]) + 1)
            if sight.both and len(at) and at[-1] == len(ids) - 1:
                raise ValueError(f"prompts: prompt {b} ends with an image, takes a token after it")
            if deepstack is not None:
                deep = [_array(f"deepstack[{b}]", x, (sight.layers, None, D)) for x in deepstack[b]]
                if [x.shape[1] for x in deep] != [len(x) for x in vectors]:
                    raise ValueError(f"deepstack: got {[x.shape[1] for x in deep]} vectors a layer for prompt {b}, "
                                     f"takes as many as embeddings, {[len(x) for x in vectors]}")
                for part, x in zip(parts, deep, strict=True):
                    added[b, part] = x.swapaxes(0, 1)
            if grids is not None:
                places[b], offset[b] = _places(len(ids), T, parts, grids[b], sight, b)
        end = -(-end // STEP) * STEP if sight.both else 0
        made: Any = dict(values=values, given=which, added=added if sight.layers else None)
        if sight.axes is not None:
            made |= dict(places=places, offset=offset, axes=sight.axes)
        if sight.both:
            made |= dict(number=number, whole=end)
        return cls(**made)

    def table(self, rope: Rope, positions: Array, context: int | None = None, factors: Array | None = None
              ) -> tuple[Array, Array]:
        """Returns cosine and sine of a rotary embedding, as `Rope.table` does, at positions `i32[B, W]` of the text."""
        if self.places is None or self.offset is None:
            return rope.table(positions, context, factors)
        T = self.places.shape[1]
        beyond = (positions + self.offset[:, None])[..., None]
        places = jnp.where((positions < T)[..., None], take(self.places, jnp.clip(positions, 0, T - 1)), beyond)
        return dataclasses.replace(rope, axes=self.axes).table(places, context, factors)

    def after_layers(self, positions: Array) -> tuple[Array, ...]:
        """Returns the vectors `f[B, W, D]` that are added to the residual stream after each of the first layers
        (DeepStack), for nodes at positions `i32[B, W]`: zeros at other tokens than those of images; () if there are
        none."""
        if self.added is None:
            return ()
        T = self.added.shape[1]
        here = take(self.added, jnp.clip(positions, 0, T - 1))
        here = jnp.where(((positions >= 0) & (positions < T))[..., None, None], here, 0)
        return tuple(here[:, :, k] for k in range(here.shape[2]))

    def seen(self, window: Window) -> Window:
        """Returns the window with an attention mask by which the tokens of one image attend to one another in both
        directions.

        Raises:
            ValueError: a window of the prompt may end inside an image.
        """
        if self.number is None:
            return window
        if window.is_prefill and window.width < self.whole:
            raise ValueError(f"chunk: got a prefill of {window.width} tokens a forward, takes at least {self.whole}: "
                             "the tokens of an image attend to one another, so all images have to be in the first one")
        return window.replace(mask=window.mask | self.together(window.positions))

    def together(self, positions: Array) -> Array:
        """Returns `bool[B, W, W]`, True for two tokens of the same image, by their positions `i32[B, W]`."""
        assert self.number is not None
        T = self.number.shape[1]
        own = jnp.where(positions < T, take(self.number, jnp.clip(positions, 0, T - 1)), -1)
        return (own[:, :, None] == own[:, None, :]) & (own >= 0)[:, :, None]


def check_cache(cache: Cache, inputs: Any) -> None:
    """Raises ValueError if `inputs` are images that are read in both directions, and the cache may assume that prompts
    are read from left to right."""
    if isinstance(inputs, Images) and inputs.number is not None and not isinstance(
            cache, (Dense, PagedCache, NoKeyValues)):
        raise ValueError(f"cache: got a {type(cache).__name__}, takes a dense or paged cache, since the tokens of an "
                         "image attend to one another")


def with_axes(layers: tuple[Layer, ...], inputs: Any) -> tuple[Layer, ...]:
    """Returns the layers with rotary embeddings whose positions have three numbers, if `inputs` are images with such
    positions. A cache that rotates keys then refuses them."""
    if not isinstance(inputs, Images) or inputs.axes is None:
        return layers
    return tuple(layer if layer.rope is None else dataclasses.replace(
        layer, rope=dataclasses.replace(layer.rope, axes=inputs.axes)) for layer in layers)


def _array(name: str, given: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    """Returns an array with float32 numbers, after a check of its shape; None: any length."""
    found = np.asarray(given, np.float32)
    if found.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, found.shape, strict=True)):
        wanted = ", ".join("n" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: got an image of shape {found.shape}, takes [{wanted}]")
    return found


def _places(length: int, total: int, parts: Sequence[np.ndarray], grids: Sequence[Any], sight: _Sight, row: int
            ) -> tuple[np.ndarray, int]:
    """Returns the positions of a prompt in time, height and width, `i32[total, 3]`, and what is added to the positions
    of the tokens after it.

    Args:
        length: number of tokens of the prompt.
        total: number of positions that are returned.
        parts: the indices of each image's tokens.
        grids: time, height and width of each image in patches.
        sight: how the model sees images.
        row: number of the prompt, for errors.
    """
    merge = sight.merge
    if len(grids) != len(parts):
        raise ValueError(f"grids: got {len(grids)} for the {len(parts)} images of prompt {row}")
    found, done, free = np.zeros((length, 3), np.int32), 0, 0
    for part, grid in zip(parts, grids, strict=True):
        time, height, width = (int(n) for n in grid)
        size = (time, height // merge, width // merge + sight.lines)
        if math.prod(size) != len(part) or height % merge or width % merge:
            which = "each token but the last of a row" if sight.lines else "each token"
            raise ValueError(f"grids: got {(time, height, width)} patches for an image of {len(part)} tokens in prompt "
                             f"{row}, takes {merge ** 2} for {which}, with sides that are multiples of {merge}")
        if part[-1] - part[0] + 1 != len(part):
            raise ValueError(f"prompts: the tokens of an image in prompt {row} are not adjacent")
        text = int(part[0]) - done
        found[done:part[0]] = (free + np.arange(text))[:, None]
        free += text
        cells, side = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1).reshape(-1, 3), max(size[1:])
        # If the rows of an image end with a vector, all three positions of a frame begin after the frame before it.
        found[part] = free + (cells * (0, 1, 1) + cells[:, :1] * side if sight.lines else cells)
        free, done = free + side * (time if sight.lines else 1), int(part[-1]) + 1
    found[done:] = (free + np.arange(length - done))[:, None]
    offset = int(found.max(initial=-1)) + 1 - length
    more = np.arange(length, total, dtype=np.int32) + offset
    return np.concatenate([found, np.repeat(more[:, None], 3, 1)]), offset


@dataclasses.dataclass(frozen=True)
class _Sight:
    """How a model sees images.

    Attributes:
        token: id of the image token.
        axes: see `Images`.
        merge: number of patches on a side that make one token.
        layers: number of layers after which vectors are added.
        both: True if the tokens of an image attend to one another.
        lines: True if each row of an image ends with a token for the end of the line, which belongs to no patches.
    """

    token: int
    axes: tuple[int, ...] | None
    merge: int
    layers: int
    both: bool
    lines: bool

    @classmethod
    def of(cls, lm: Any, token: int | None) -> _Sight:
        c = lm.config_entries
        if c and lm.directory is None:
            raise ValueError(f"lm: got {lm.name!r} of a GGUF file, which does not say how the model sees images; takes "
                             "a directory with a config.json")
        kind, sight, text = str(c.get("model_type")), c.get("vision_config") or {}, c.get("text_config") or c
        if token is None:
            token = c.get("image_token_id", c.get("image_token_index"))
        if token is None:
            raise ValueError(f"token: got None, and {lm.name!r} names no image token; takes its id")
        axes = None
        if kind in SECTIONS:
            rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
            ropes = [layer.rope for layer in lm.model.config.layers if layer.rope is not None]
            axes = _axes(rope.get("mrope_section") or SECTIONS[kind], ropes[0], kind in ADJACENT)
        stacked = sight.get("deepstack_visual_indexes", [8, 16, 24]) if kind.startswith("qwen3_vl") else []
        return cls(token, axes, sight.get("spatial_merge_size", 2), len(stacked), kind == "gemma3",
                   kind == "hy_v4_vl")


def _axes(sections: Sequence[int], rope: Rope, adjacent: bool) -> tuple[int, ...]:
    """Returns the number of a position, 0 to 2, to which each frequency of a rotary embedding belongs.

    >>> _axes((2, 1, 1), Rope(8), True), _axes((2, 1, 1), Rope(8), False)
    ((0, 0, 1, 2), (0, 1, 2, 0))
    """
    half = rope.width // 2
    if len(sections) != 3 or (adjacent and sum(sections) != half):
        raise ValueError(f"mrope_section: got {list(sections)}, takes three numbers with the sum {half}")
    if adjacent:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    found = [0] * half
    for axis in (1, 2):
        for i in range(axis, min(3 * sections[axis], half), 3):
            found[i] = axis
    return tuple(found)


def images_of(cache: Cache) -> Images | None:
    """Returns the images that the rows of a cache were given (`Cache.inputs`); None if they were given none."""
    return cache.inputs if isinstance(cache.inputs, Images) else None


def no_images(cache: Cache) -> None:
    """Raises an error if the rows of a cache have images; for methods that run the layers of a model one by one, which
    cannot read them.

    Raises:
        ValueError: the rows of the cache have images.
    """
    if images_of(cache) is not None:
        raise ValueError("inputs: got Images, with which layers cannot run one by one; takes none, or another method")
