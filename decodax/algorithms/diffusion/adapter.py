"""Adapter: describes how a model processes a canvas. It determines the position that logits predict, the positions that
attend to each other, and the token of an undecided position. `FillsCanvas` is the base of the methods that fill one."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.algorithm import Algorithm
from decodax.core.keys import Purpose
from decodax.core.loaded import Loaded


@struct
class Nodes(Struct):
    """Positions of the text that a forward pass computes, `n` for each row.

    Attributes:
        positions: `i32[B, n]`, absolute positions.
        live: `bool[B, n]`, False for padding.
        own: `bool[B, n]`, True for nodes that are part of the window; False for those that have final tokens or are
            after the window.
        prompt: `i32[B]`, number of prompt tokens.
    """

    positions: Array
    live: Array
    own: Array
    prompt: Array | None = None


class AttentionPattern(Protocol):
    """Protocol of attention patterns of diffusion models: which positions attend to which. "Final" tokens are those
    before the window, which no longer change; the "window" is the range of positions that a round fills."""

    @property
    def causal(self) -> bool:
        """True if final tokens attend only to earlier ones, so that an ordinary causal prefill computes the keys and
        values of the prompt."""

    @property
    def joined(self) -> bool:
        """True if the window attends in both directions to a copy of the last final token, from which a model whose
        logits predict the next position predicts the window's first token. The copy's keys and values differ from the
        cached ones."""

    @property
    def overhangs(self) -> bool:
        """True if the last window keeps its full width even where the text ends inside it, as in the training of models
        that attend to nothing after a window."""

    def sees(self, nodes: Nodes, front: Array) -> Array:
        """Returns the attention mask among nodes, `bool[B, n, n]`: entry `[b, i, j]` is True if node `i` attends to
        node `j`. `front` (`i32[B]`) is the start of the window; all tokens before it are final."""

    def reach(self, start: Array, width: int, end: Array) -> Array:
        """Returns the position after the last one that a forward pass has to compute, `i32[B]`: `end` if the window
        attends to what follows it, else at most the window's end.

        Args:
            start: `i32[B]`, start of the window.
            width: number of positions of the window.
            end: `i32[B]`, end of the text.
        """


def _pairs(x: Array) -> tuple[Array, Array]:
    return x[:, :, None], x[:, None, :]


@dataclasses.dataclass(frozen=True)
class Full:
    """Every position attends to the whole text, in both directions (LLaDA, Dream, MDLM)."""

    causal = joined = overhangs = False

    def sees(self, nodes: Nodes, front: Array) -> Array:
        return jnp.ones((*nodes.positions.shape, nodes.positions.shape[1]), bool)

    def reach(self, start: Array, width: int, end: Array) -> Array:
        return end


@dataclasses.dataclass(frozen=True)
class BlockCausal:
    """A position attends to its own block and the blocks before it (BD3-LM, SDAR, Fast-dLLM v2, LLaDA 2).

    Attributes:
        block: number of positions of a block. Blocks are counted from the beginning of the sequence, so the prompt's
            last tokens may be in one block with the first new ones.
    """

    block: int
    causal = joined = False
    overhangs = True

    def sees(self, nodes: Nodes, front: Array) -> Array:
        query, key = _pairs(nodes.positions // self.block)
        return key <= query

    def reach(self, start: Array, width: int, end: Array) -> Array:
        return jnp.minimum(start + width, end)


@dataclasses.dataclass(frozen=True)
class PromptBlocks:
    """A position attends to its own block and the blocks before it. The prompt is one block (D2F).

    Attributes:
        block: number of positions of a block; blocks are counted from the prompt's end.
    """

    block: int
    causal = joined = False
    overhangs = True

    def sees(self, nodes: Nodes, front: Array) -> Array:
        assert nodes.prompt is not None
        query, key = _pairs(jnp.maximum((nodes.positions - nodes.prompt[:, None]) // self.block, -1))
        return key <= query

    def reach(self, start: Array, width: int, end: Array) -> Array:
        return jnp.minimum(start + width, end)


@dataclasses.dataclass(frozen=True)
class CausalPrefix:
    """Final tokens attend to those before them; the window attends to them and to all of itself (SBD, DiffusionGemma).

    Attributes:
        joined: True if the last final token is also part of the window, which attends to a copy of it (SDLM).
        ordered: True if the window's positions attend only to those before them: causal attention throughout (SDLM's
            `causal_attn`).

    With either, the last final token predicts the window's first, so a window of `W` positions has `W - 1` masks.
    """

    joined: bool = False
    ordered: bool = False
    causal = overhangs = True

    def __post_init__(self) -> None:
        if self.joined and self.ordered:
            raise ValueError("joined: got True, takes False with ordered=True")

    def sees(self, nodes: Nodes, front: Array) -> Array:
        (query, key), (of, to) = _pairs(nodes.positions), _pairs(nodes.own)
        inside = of & (key <= query) if self.ordered else of
        return jnp.where(to, inside, jnp.where(of, key < front[:, None, None] - int(self.joined), key <= query))

    def reach(self, start: Array, width: int, end: Array) -> Array:
        # the last position of a shifted window is predicted by the one before it, and seen by none
        return jnp.minimum(start + width - int(self.joined or self.ordered), end)


class InitialCanvas(Protocol):
    """Protocol of initial canvases: the tokens that undecided ("open") positions have before the first denoising
    step."""

    def fill(self, adapter: Adapter, tokens: Array, prompt_length: Array, key: Array) -> tuple[Array, Array]:
        """Returns the canvas `i32[B, N]` and its open positions `bool[B, N]`.

        Args:
            adapter: the adapter, which has the mask token.
            tokens: `i32[B, N]`, the token buffer.
            prompt_length: `i32[B]`, number of prompt tokens.
            key: random keys of the rows.
        """

    @property
    def given(self) -> bool:
        """True if the text has a given length (infilling), so that the canvas is not extended beyond it."""


@dataclasses.dataclass(frozen=True)
class Masks:
    """The usual initial canvas: the mask token at all positions after the prompt."""

    given = False

    def fill(self, adapter: Adapter, tokens: Array, prompt_length: Array, key: Array) -> tuple[Array, Array]:
        open = jnp.arange(tokens.shape[1]) >= prompt_length[:, None]
        return jnp.where(open, jnp.int32(adapter.blank), tokens), open


@dataclasses.dataclass(frozen=True)
class Template:
    """The initial canvas of infilling: the token buffer after the prompt is a template whose mask tokens are filled in;
    its other tokens do not change. The text ends at the row's maximum length."""

    given = True

    def fill(self, adapter: Adapter, tokens: Array, prompt_length: Array, key: Array) -> tuple[Array, Array]:
        beyond = jnp.arange(tokens.shape[1]) >= prompt_length[:, None]
        return tokens, beyond & (tokens == adapter.blank)


@dataclasses.dataclass(frozen=True)
class Noise:
    """The initial canvas of uniform diffusion models, which have no mask token: random tokens at all positions after
    the prompt.

    Attributes:
        vocabulary: size of the vocabulary; tokens are uniform over it.
    """

    vocabulary: int
    given = False

    def fill(self, adapter: Adapter, tokens: Array, prompt_length: Array, key: Array) -> tuple[Array, Array]:
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        open = place >= prompt_length[:, None]
        return jnp.where(open, noise(keys.uniforms(key, place, Purpose.NOISE), self.vocabulary), tokens), open


def noise(uniforms: Array, vocabulary: int) -> Array:
    """Converts uniform random numbers to uniform random token ids from 0 to `vocabulary - 1`: `i32[...]` from `f32[...,
    2]` (only the first of each pair is used)."""
    return jnp.minimum((uniforms[..., 0] * vocabulary).astype(jnp.int32), vocabulary - 1)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Describes how a model processes a canvas.

    Attributes:
        mask: id of the mask token; None for models without one. Its logit is removed, so it never occurs in the text.
        shift: True if logits at a position predict the next position (models made from autoregressive ones, such as
            Dream); False if they predict the position itself (LLaDA).
        attention: the positions that attend to each other.
        canvas: initial tokens of undecided positions.
        conditioning: number of channels of the expected embeddings under its last predictions that the model reads
            (self-conditioning); 0: it reads none.
        autoregressive: True for an ordinary causal model, which was not trained as a diffusion model.
    """

    mask: int | None
    shift: bool = False
    attention: AttentionPattern = Full()
    canvas: InitialCanvas = Masks()
    conditioning: int = 0
    autoregressive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ordered = isinstance(self.attention, CausalPrefix) and self.attention.ordered
        if (self.attention.joined or ordered) and not self.shift:
            raise ValueError(f"attention: got {self.attention} without shift, which alone has use for the last token")
        if self.mask is None and not isinstance(self.canvas, Noise):
            raise ValueError("mask: got None, takes the id of the mask token; only a canvas of noise does without")

    @classmethod
    def of(cls, model: Any, canvas: InitialCanvas | None = None) -> Adapter:
        """Returns the adapter of a loaded model. `model` is the result of `load`, or its `diffusion`.

        Raises:
            ValueError: the model is not a masked diffusion model.
        """
        d = model.diffusion if isinstance(model, Loaded) else model
        if d is None:
            raise ValueError(f"lm: got {model.name if isinstance(model, Loaded) else None}, which is autoregressive, "
                             "takes a diffusion model")
        if d.attention == "any-subset":
            raise ValueError("lm: got an any-subset model, which decodes with assd; takes a masked diffusion model")
        attention: AttentionPattern = Full()
        if d.attention == "block-causal":
            attention = BlockCausal(d.block)
        elif d.attention != "full":
            ordered = d.attention == "causal"
            attention = CausalPrefix(joined=d.shift and not ordered, ordered=ordered)
        return cls(d.mask, d.shift, attention, canvas or Masks(), d.conditioning)

    @property
    def blank(self) -> int:
        """Id of the token at positions that are not decided: the mask token, or 0 if the model has none (the canvas
        then sets random tokens)."""
        return 0 if self.mask is None else self.mask

    def clean(self, head: Any) -> Any:
        """Returns the function `head` (hidden states to logits) changed so that the logit of the mask token is -inf;
        `head` itself if there is no mask token."""
        return head if self.mask is None else lambda hidden: head(hidden).at[..., self.mask].set(-jnp.inf)


class FillsCanvas(Algorithm, abc.ABC):
    """Base of methods that fill the open positions of a canvas: derive a frozen dataclass from it. Its state has the
    text of each row by absolute position, `tokens` (`i32[B, N]`), True for positions that are not decided, `open`
    (`bool[B, N]`), and the end of the text, `end` (`i32[B]`).

    Attributes:
        adapter: describes how the model processes the canvas.
    """

    if TYPE_CHECKING:

        @property
        def adapter(self) -> Adapter: ...

    def infilling(self) -> Self:
        """Returns this method for infilling: undecided positions are the mask tokens in the token buffer, and all other
        tokens, also those after the first gap, are given (`Template`)."""
        return dataclasses.replace(self, adapter=dataclasses.replace(     # type: ignore[type-var]
            self.adapter, canvas=Template()))
