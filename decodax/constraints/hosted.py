"""Context-free grammars by a matcher on the host, which is called once in each round for all positions.

The matcher is that of llguidance (an extra: `pip install decodax[grammar]`). Its result depends on the text alone, so
it works with drafts, trees, beams and forks. The matchers of recent texts are cached; a text that extends one of them
costs one token.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import static, struct
from decodax.sampling.base import Context, PyTree, Transform

KEPT = 8192
"""Number of matchers of recent texts that are cached."""


class Matcher:
    """The matchers of several grammars over one vocabulary. It is compared by identity, since it is static under jit.

    Args:
        grammars: grammars in llguidance's Lark notation, or JSON.
        token_bytes: the bytes of each token; empty for special tokens.
        eos: end-of-sequence tokens, at least one.
        encode: a function from a string to token ids.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: a grammar is invalid.
    """

    def __init__(self, grammars: Sequence[str], token_bytes: Sequence[bytes], eos: Sequence[int], encode: Any):
        try:
            import llguidance
        except ImportError:
            raise ImportError("grammar: recursive rules need llguidance; pip install 'decodax[grammar]'") from None
        if not eos:
            raise ValueError("grammar: got a model without an end of sequence, takes one that has it")
        self.llguidance, self.size, self.eos = llguidance, len(token_bytes), tuple(eos)
        special = [i for i, t in enumerate(token_bytes) if not t]
        names = [bytes(t) if t else b"\xff" + f"[{i}]".encode() for i, t in enumerate(token_bytes)]
        words = _Vocabulary(eos[0], names, special, encode)
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words))
        self.grammars, self.first = list(grammars), []
        for grammar in grammars:
            matcher = self._fresh(grammar)
            if matcher.is_error():
                raise ValueError(f"grammar: {matcher.get_error()}")
            self.first.append(matcher)
        self.known: collections.OrderedDict[tuple[int, tuple[int, ...]], Any] = collections.OrderedDict()
        self.lock = threading.Lock()

    def _fresh(self, grammar: str) -> Any:
        text = grammar if grammar.lstrip().startswith("{") else self.llguidance.LLMatcher.grammar_from_lark(grammar)
        return self.llguidance.LLMatcher(self.tokenizer, text)

    def after(self, which: int, text: tuple[int, ...]) -> Any:
        """Returns the matcher of grammar `which` after a text; None if no allowed text begins with it."""
        key = which, text
        if key in self.known:
            self.known.move_to_end(key)
            return self.known[key]
        if not text:
            return self.first[which]
        before = self.after(which, text[:-1])
        found = None
        if before is not None and text[-1] not in self.eos:
            found = before.deep_copy()
            if not found.consume_token(text[-1]) or found.is_error():
                found = None
        self.known[key] = found
        if len(self.known) > KEPT:
            self.known.popitem(last=False)
        return found

    def masks(self, which: np.ndarray, tokens: np.ndarray, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Returns the allowed next tokens as bits, `u8[..., ceil(V / 8)]`, lowest bit first.

        All tokens are allowed where `which` is negative, and after a text that is itself not allowed (which is never
        continued).

        Args:
            which: `i32[...]`, the grammar of each text; -1 for none.
            tokens: `i32[..., N]`, rows of tokens.
            begin: `i32[...]`, index of the first token of each text.
            length: `i32[...]`, index after its last token.
        """
        shape = np.broadcast_shapes(np.shape(which), np.shape(length))
        out = np.full((*shape, -(-self.size // 8)), 255, np.uint8)
        flat = out.reshape(-1, out.shape[-1])
        each = [np.broadcast_to(x, shape).reshape(-1) for x in (which, begin, length)]
        rows = np.broadcast_to(tokens, (*shape, np.shape(tokens)[-1])).reshape(len(flat), -1)
        with self.lock:
            for i, (w, a, b) in enumerate(zip(*each, strict=True)):
                text = rows[i, a:b]
                if w < 0 or (text < 0).any():
                    continue
                matcher = self.after(int(w), tuple(text.tolist()))
                if matcher is not None:
                    flat[i] = self.allowed_of(matcher)
        return out

    def allowed_of(self, matcher: Any) -> np.ndarray:
        """Returns the next tokens that a matcher allows as bits, `u8[ceil(V / 8)]`."""
        bits: np.ndarray = np.zeros(self.size, bool)
        if matcher.is_stopped():
            bits[list(self.eos)] = True
        else:
            bias = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
            bits[:len(bias)] = bias[:self.size] > 0
            bits[list(self.eos)] = matcher.is_accepting()
        return np.packbits(bits, bitorder="little")


class _Vocabulary:
    """The interface of a tokenizer that llguidance expects."""

    def __init__(self, eos: int, tokens: list[bytes], special: list[int], encode: Any):
        self.eos_token_id, self.bos_token_id, self.tokens = eos, None, tokens
        self.special_token_ids, self.encode = special, encode

    def __call__(self, text: Any) -> list[int]:
        return self.encode(text if isinstance(text, str) else bytes(text).decode("utf-8", "replace"))


@struct
class Hosted(Transform):
    """Allows only the tokens that the matcher of a grammar allows.

    It does not know how many tokens a text still needs, so a text that reaches its maximum length ends incomplete, with
    `Status.LENGTH`.

    Attributes:
        which: `i32[B]`, the grammar of each row; -1 for none.
        matcher: static; the `Matcher`.
    """

    which: Array
    matcher: Any = static()

    needs = "sequence"

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        size = logits.shape[-1]
        shape = jax.ShapeDtypeStruct((-(-self.matcher.size // 8),), jnp.uint8)
        bits = jax.pure_callback(self.matcher.masks, shape, self.which, ctx.tokens, ctx.prompt_length, ctx.length,
                                 vmap_method="broadcast_all")
        allowed = (bits[jnp.arange(size) // 8] >> (jnp.arange(size) % 8).astype(jnp.uint8)) & 1
        return jnp.where(allowed.astype(bool) | jnp.isnan(logits), logits, -jnp.inf)
