"""Training of prompt tokens, look-ahead embeddings and hidden transfer (`decodax.models.drafters.prompt_tokens`),
beside a target that does not change.

At random places of a text the probes are inserted, all of a text in one forward pass of the target: they see the text
up to their place and each other, and nothing sees them (PPD, Chen et al., 2024; Wu et al., 2024). Look-ahead embeddings
have a pass of their own, with the token before them, as in drafting (PaSS, Monea et al., 2023; S3D, Zhong and
Bharadwaj, 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core.capabilities import tree_buffer
from decodax.core.types import Out, logits_of
from decodax.core.window import Window, causal
from decodax.models.drafters.block_training import random_anchors
from decodax.models.drafters.head import Weights
from decodax.models.drafters.prompt_tokens import HiddenTransferHead, LookAheadHead, ProbesHead
from decodax.train.drafting.blocks import key_of
from decodax.train.drafting.losses import loss_of
from decodax.train.drafting.unrolled import acceptance
from decodax.train.loop import cast

Tree = Any


@dataclass(frozen=True)
class InsertedPrompts:
    """The loss of probes, which are prompt tokens, look-ahead embeddings or transferred hidden states, at random places
    of a text.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        head: the probes.
        places: number of places in a text.
        loss: name of the loss of a token, see `decodax.train.drafting.losses`.
        decay: the loss of the `j`-th probe, from 0, has the weight `decay ** j`.
        dtype: dtype of the computation.
        features: weight of the mean squared distance between a pseudo hidden state and the state that the target has
            after the same layer at the token that it stands for (hidden transfer). Wu et al. add it to the divergence
            as an option; that it counts at the layer where a state begins alone is our choice.

    Raises:
        ValueError: `features` is not 0 for probes without hidden states of their own.
    """

    target: Any
    head: ProbesHead
    places: int = 64
    loss: str = "kl"
    decay: float = 0.8
    dtype: str = "float32"
    ids: None = None
    features: float = 0.0

    def __post_init__(self) -> None:
        if self.features and not isinstance(self.head, HiddenTransferHead):
            raise ValueError(f"features: got {self.features} for a {type(self.head).__name__}, whose probes are "
                             "embeddings; takes 0")

    @property
    def steps(self) -> int:
        """Number of drafts that the loss compares at each place: one for each probe, and for look-ahead embeddings one
        more, that of the newest token."""
        return self.head.longest

    def __call__(self, params: Tree, batch: Array, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss, a mean over probes, and scalars to log: "loss", and the acceptance of each.

        Args:
            params: the head's weights.
            batch: `i32[B, T + 1]`; the last token is not used.
            extra: the target's weights.
        """
        n, ahead = self.steps, isinstance(self.head, LookAheadHead)
        truth, own, labels, live, far = self._outputs(params, batch[:, :-1], extra)
        count = lambda x: jnp.where(live, x, 0).reshape(len(batch), -1, n).sum((0, 1))
        many = jnp.maximum(count(1.0), 1)
        scalars = {f"accepted_{j + 1}": x for j, x in enumerate(count(acceptance(truth, own)) / many)}
        shares = self.decay ** jnp.arange(n - ahead)
        shares = jnp.pad(shares / shares.sum(), (ahead, 0))     # the newest token's draft has nothing to learn
        each = loss_of(self.loss)(truth, own, labels)
        if self.features:
            each = each + self.features * far()
        loss = (count(each) / many * shares).sum()
        return loss, {"loss": loss, **scalars}

    def compared(self, params: Tree, tokens: Array, extra: Tree) -> tuple[Array, Array, Array, Array]:
        """Runs target and drafter on texts `tokens`, `i32[B, T]`, with probes at `A` random places; a place has `K`
        drafts.

        Returns the target's logits and the drafts', `f32[B, A K, V]` each; the text's own tokens, `i32[B, A K]`, -1
        after its end; and True for drafts that count, `bool[B, A K]`. `params` are the drafter's weights, `extra` the
        target's.
        """
        return self._outputs(params, tokens, extra)[:4]

    def _outputs(self, params: Tree, tokens: Array,
                 extra: Tree) -> tuple[Array, Array, Array, Array, Callable[[], Array]]:
        """Returns the result of `compared`, and a function that returns the squared distances of the pseudo hidden
        states from the target's, means over channels, `f32[B, A K]`."""
        (B, T), n, ahead = tokens.shape, self.steps, isinstance(self.head, LookAheadHead)
        usable = jnp.broadcast_to(jnp.arange(T) < T - 2, (B, T))
        places, begun = random_anchors(key_of(tokens), usable, min(self.places, T - 2))
        weights, params = cast(jax.lax.stop_gradient(extra), self.dtype), cast(params, self.dtype)
        flat = lambda x: x.reshape(B, -1)
        if isinstance(self.head, LookAheadHead):
            out, hidden = look_ahead(self.target, weights, tokens, places, params["prompts"], self.head)
            own = logits_of(self.target, weights, hidden.reshape(B, -1, hidden.shape[-1]))
        else:
            out = self.target.apply(weights, inserted(tokens, places, self.head, params), self.target.init_cache(B, 0))
            own = out.logits(jnp.broadcast_to(jnp.arange(T, out.hidden.shape[1], dtype=jnp.int32),
                                              (B, out.hidden.shape[1] - T)))
            own = own.reshape(B, -1, self.head.ensemble, own.shape[-1]).mean(2)
        at = places[..., None] + (not ahead) + jnp.arange(n, dtype=jnp.int32)       # the target predicts the same there
        live = flat((at < T) & begun[..., None])
        labels = jnp.where(flat(at + 1) < T, jnp.take_along_axis(tokens, jnp.minimum(flat(at + 1), T - 1), 1), -1)
        truth = jax.lax.stop_gradient(out.logits(jnp.minimum(flat(at), T - 1)))
        return truth, own, labels, live, lambda: self._far(out, flat(jnp.minimum(at, T - 1)), T)

    def _far(self, out: Out, at: Array, length: int) -> Array:
        """Returns the squared distances of the pseudo hidden states in a target's output from those at the tokens `at`,
        `i32[B, A K]`, of texts of `length` tokens: `f32[B, A K]`."""
        assert isinstance(self.head, HiddenTransferHead) and out.layers is not None
        n, squares = self.head.heads, []
        for j, layer in enumerate(self.head.begin):
            x = out.layers[layer].astype(jnp.float32)
            true = jax.lax.stop_gradient(jnp.take_along_axis(x[:, :length], at[:, j::n, None], 1))
            squares.append(jnp.square(x[:, length + j::n] - true).mean(-1))
        return jnp.stack(squares, -1).reshape(at.shape)


def inserted(tokens: Array, places: Array, head: ProbesHead, weights: Weights) -> Window:
    """Returns the input of a forward pass over texts with probes at some places. The probes come after all tokens of
    the text; their positions and the attention mask are those of nodes that follow the token at their place.

    Args:
        tokens: `i32[B, T]`, the texts.
        places: `i32[B, A]`, positions of the tokens after which the probes stand.
        head: the probes.
        weights: the head's weights.
    """
    (B, T), A, n = tokens.shape, places.shape[1], head.heads * head.ensemble
    prompts, transfer = head.inputs(weights, places)
    place, probe = np.divmod(np.arange(A * n), n)
    index, member = np.divmod(probe, head.ensemble)
    positions, mask = beside(T, places[:, place], place * head.ensemble + member, index)
    w = Window(tokens=jnp.pad(tokens, ((0, 0), (0, A * n))), mask=mask, live=jnp.ones((B, T + A * n), bool),
               positions=positions, hints=() if transfer is None else (transfer,))
    if prompts is None:
        return w
    vectors = jnp.broadcast_to(prompts[probe], (B, A * n, prompts.shape[1]))
    return w.replace(embeddings=jnp.pad(vectors, ((0, 0), (T, 0), (0, 0))),
                     embedded=jnp.broadcast_to(np.arange(T + A * n) >= T, (B, T + A * n)))


def beside(length: int, at: Array, place: np.ndarray, index: np.ndarray) -> tuple[Array, Array]:
    """Returns the positions, `i32[B, T + M]`, and the attention mask, `bool[B, T + M, T + M]`, of texts of `T` tokens
    and `M` further nodes, each of which follows some token. Such a node attends to the text up to and including that
    token, to the nodes before it at the same place, and to itself.

    Args:
        length: number of tokens of a text `T`.
        at: `i32[B, M]`, position of the token that each node follows.
        place: `i64[M]`, equal for nodes that follow the same token and see each other.
        index: `i64[M]`, number of nodes there that come before each.
    """
    (B, M), T = at.shape, length
    here = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    own = (place[:, None] == place) & (index <= index[:, None])
    text = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    mask = jnp.concatenate([
        jnp.pad(text, ((0, 0), (0, 0), (0, M))),
        jnp.concatenate([at[:, :, None] >= here[:, None], jnp.broadcast_to(own, (B, *own.shape))], 2)], 1)
    return jnp.concatenate([here, at + 1 + index.astype(np.int32)], 1), mask


def look_ahead(target: Any, weights: Tree, tokens: Array, places: Array, vectors: Array,
               head: LookAheadHead) -> tuple[Out, Array]:
    """Runs a target on texts, and then the passes that draft after some of their tokens: each over that token and the
    vectors after it, which see the text before it as the whole target has computed it.

    Args:
        target: the target's network.
        weights: its weights.
        tokens: `i32[B, T]`, the texts.
        places: `i32[B, A]`, positions of the newest tokens of the passes.
        vectors: `f[K, D]`, the embeddings after them.
        head: the drafter, which says the layers that these passes leave out.

    Returns:
        The target's output for the texts; and `f[B, A, 1 + K, D]`, the hidden states at the newest tokens and at the
        vectors.
    """
    (B, T), A, n = tokens.shape, places.shape[1], 1 + vectors.shape[0]
    empty = target.init_cache(B, 0)
    out = target.apply(weights, causal(tokens, jnp.zeros(B, jnp.int32)), empty)
    here = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    text = tree_buffer(empty, out.entries, T).append(out.entries, here, jnp.int32(0))
    place, index = np.divmod(np.arange(A * n), n)
    at = places[:, place]
    w = Window(tokens=jnp.take_along_axis(tokens, at, 1), positions=at + index.astype(np.int32),
               mask=jnp.asarray((place[:, None] == place) & (index <= index[:, None]))[None],
               live=jnp.ones((B, A * n), bool), embedded=jnp.broadcast_to(index > 0, (B, A * n)),
               embeddings=jnp.broadcast_to(jnp.pad(vectors, ((1, 0), (0, 0)))[index], (B, A * n, vectors.shape[1])))
    keep = head.kept(target.depth) if head.skip else None
    hidden = target.apply(weights, w, text.seen_by(here[:, None] < at[:, :, None]), *(() if keep is None else (keep,))
                          ).hidden
    return out, hidden.reshape(B, A, n, -1)


__all__ = ["InsertedPrompts", "beside", "inserted", "look_ahead"]
