"""A tokenizer inside a compiled program: from tokens to bytes, and from bytes to tokens by byte-pair merges.

A draft model with another vocabulary needs the text tokenized again in every round, on the device. The rule is that of
byte-pair encoding (Sennrich et al. 2016): in each segment, the pair of neighbours with the lowest rank merges, until no
pair can. A segment ends between two bytes that are not adjacent in any token, so segments are words or parts of words,
and are merged in parallel.

The result may differ from that of the tokenizer, which is acceptable since drafts are guesses. Of a tokenizer's splits
into words by a regular expression, only one is known: whether the last of several spaces belongs to the word after it
(GPT-2, Llama 3, Qwen). Added tokens are never produced. For a vocabulary without merges (Unigram, WordPiece), any two
tokens whose concatenation is a token may merge, low ids first, as in conversions to byte-pair encoding. On Python
source, 98 to 99% of the tokens are those of `pycode`'s tokenizer, and of tokenizers that split as GPT-2 and Llama 3 do;
longest match, the usual shortcut, gives 89 to 92%.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.struct import Struct, static, struct

NONE = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Merges:
    """A vocabulary with its merges, on the host. Ids from `size` on are symbols that are no tokens: bytes without a
    token, and prefixes of characters that have a token as a whole.

    Attributes:
        spelled: the bytes of each token; b"" for tokens that add nothing to a text.
        ids: token ids by their bytes; of several tokens with the same bytes, the one that the tokenizer produces.
        byte: the symbol of each of the 256 bytes.
        pairs: rank and result of each pair of symbols that may merge.
    """

    spelled: list[bytes]
    ids: dict[bytes, int]
    byte: list[int]
    pairs: dict[tuple[int, int], tuple[int, int]]

    @property
    def size(self) -> int:
        return len(self.spelled)

    @classmethod
    def of(cls, tokenizer: Any, size: int | None = None) -> Merges:
        """Returns the merge rules of a `decodax.io.text.Tokenizer`, for a model with `size` logits (None: the
        tokenizer's number of tokens); tokens beyond `size` are left out."""
        spelled = tokenizer.token_bytes()
        spelled = (spelled + [b""] * ((size or 0) - len(spelled)))[:size]
        names = {i: name for name, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
        added = set(tokenizer.backend.get_added_tokens_decoder())
        # a character's own token before the stand-in for its byte, and both before what was added later
        dull = lambda i: (i in added, len(names.get(i, "")) == 6 and names.get(i, "").startswith("<0x"))
        ids: dict[bytes, int] = {}
        for i in sorted(range(len(spelled)), key=dull):
            if spelled[i]:
                ids.setdefault(spelled[i], i)

        symbols = dict(ids)
        symbol = lambda word: symbols.setdefault(word, len(spelled) + len(symbols) - len(ids))
        byte = [symbol(bytes([b])) for b in range(256)]
        model = json.loads(tokenizer.backend.to_str())["model"]
        ranked: list[tuple[int, int, int]] = []
        if model["type"] == "BPE":
            vocabulary, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
            for merge in model["merges"]:
                a, b = merge if isinstance(merge, list) else merge.split(" ")
                ranked.append((vocabulary[a], vocabulary[b], vocabulary[a + b.removeprefix(prefix)]))
            ranked = [x for x in ranked if max(x) < len(spelled)]
        else:
            for word, i in sorted(ids.items(), key=lambda x: x[1]):
                parts = [(symbols.get(word[:j]), symbols.get(word[j:])) for j in range(1, len(word))]
                ranked += [(a, b, i) for a, b in parts if a is not None and b is not None]
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        made = {i for _, _, i in ranked}
        for word, i in ids.items():
            if len(word) > 1 and i not in made and i not in added and _is_character(word):
                for j in range(2, len(word) + 1):
                    pairs[symbol(word[:j - 1]), byte[word[j - 1]]] = 0, symbol(word[:j])
        for rank, (a, b, i) in enumerate(ranked):
            pairs.setdefault((a, b), (rank + 1, i))
        return cls(spelled, ids, byte, pairs)

    def split(self, data: bytes) -> list[int]:
        """Tokenizes one segment, such as a word: returns the token ids of its bytes. Bytes that no token spells are
        left out."""
        symbols = [self.byte[b] for b in data]
        sizes = [1] * len(data)
        while True:
            found = [(self.pairs[p][0], i) for i, p in enumerate(pairwise(symbols)) if p in self.pairs]
            if not found:
                break
            i = min(found)[1]
            symbols[i:i + 2] = [self.pairs[symbols[i], symbols[i + 1]][1]]
            sizes[i:i + 2] = [sizes[i] + sizes[i + 1]]
        out, at = [], 0
        for symbol, size in zip(symbols, sizes, strict=True):
            out += [symbol] if symbol < self.size else [self.byte[b] for b in data[at:at + size]]
            at += size
        return [symbol for symbol in out if symbol < self.size]


@struct
class ByteVocabulary(Struct):
    """A vocabulary with its merges, on the device, as an argument of compiled programs; made by `build`.

    Attributes:
        text: `u8[C]`, the bytes of all tokens, one after the other.
        starts: `i32[V + 1]`, index in `text` of each token's first byte.
        byte: `i32[256]`, symbol of each byte.
        joins: `bool[256, 256]`, True if some token has these two bytes next to each other.
        spaces: `bool[2]`, True if the last of several white spaces, if it is a space, belongs to the following word:
            within a line, and after a line break.
        buckets: `i32[H + 1]`, first entry of each bucket of the hash table of pairs; H is a power of two.
        left: `i32[pairs + depth]`, left symbol of each pair that may merge.
        right: `i32[pairs + depth]`, right symbol.
        rank: `i32[pairs + depth]`, rank of the merge.
        merged: `i32[pairs + depth]`, resulting symbol.
        depth: static; number of pairs in the fullest bucket.
        longest: static; number of bytes of the longest token.
    """

    text: Array
    starts: Array
    byte: Array
    joins: Array
    spaces: Array
    buckets: Array
    left: Array
    right: Array
    rank: Array
    merged: Array
    depth: int = static()
    longest: int = static()

    @classmethod
    def build(cls, tokenizer: Any, size: int | None = None) -> ByteVocabulary:
        """Builds it from a `decodax.io.text.Tokenizer`, on the host. `size`: number of the model's logits; None: the
        tokenizer's size.

        Raises:
            ValueError: no text can be tokenized, since no token is a single byte or character.
        """
        merges = Merges.of(tokenizer, size)
        V = merges.size
        makes = {i for _, i in merges.pairs.values()} | set(merges.byte)
        if not any(i < V for i in makes):
            raise ValueError("tokenizer: none of its tokens is a byte or a character, so no other text can be cut into "
                             "them")
        text = np.frombuffer(b"".join(merges.spelled), np.uint8)
        starts = np.cumsum([0, *map(len, merges.spelled)]).astype(np.int32)
        # pairs of bytes inside a token that merges can make
        inner = np.isin(np.repeat(np.arange(V), np.diff(starts)), list(makes))
        inner[starts[1:][np.diff(starts) > 0] - 1] = False
        joins = np.zeros((256, 256), bool)
        at = np.flatnonzero(inner)
        joins[text[at], text[at + 1]] = True

        table = np.array([(a, b, rank, i) for (a, b), (rank, i) in merges.pairs.items()], np.int32).reshape(-1, 4)
        bits = max(len(table), 2).bit_length()
        bucket = _bucket(table[:, 0], table[:, 1], bits)
        order = np.argsort(bucket, kind="stable")
        buckets = np.searchsorted(bucket[order], np.arange((1 << bits) + 1)).astype(np.int32)
        depth = max(int(np.diff(buckets).max()), 1)
        left, right, rank, merged = np.pad(table[order], ((0, depth), (0, 0)), constant_values=-1).T.copy()
        arrays = dict(text=np.append(text, np.uint8(0)), starts=starts, byte=np.array(merges.byte, np.int32),
                      joins=joins, spaces=_spaces(tokenizer), buckets=buckets, left=left, right=right, rank=rank,
                      merged=merged)
        return cls(**jax.tree.map(jnp.asarray, arrays), depth=depth, longest=max(map(len, merges.spelled)))

    @property
    def size(self) -> int:
        """Number of tokens, `V`."""
        return self.starts.shape[0] - 1

    def lengths(self, tokens: Array) -> Array:
        """Returns the number of bytes of each token in `tokens` (`i32[...]`, ids of 0 or more): `i32[...]`, 0 for
        special tokens."""
        return self.starts[tokens + 1] - self.starts[tokens]

    def split(self, data: Array, count: Array) -> tuple[Array, Array]:
        """Tokenizes the bytes of one row.

        Args:
            data: `u8[T]`, the bytes.
            count: `i32[]`, number of valid bytes.

        Returns:
            `i32[T]`, the token that begins at each byte, -1 where none does (bytes without a token are left out); and
            `i32[]`, the first byte of the last segment: text added later does not change the tokens before it.
        """
        T, V = data.shape[0], self.size
        place = jnp.arange(T, dtype=jnp.int32)
        ends = self._segments(data, count)
        segment = jnp.cumsum(ends) - 1
        byte = jnp.where(place < count, self.byte[data], -1)

        def pairs(symbols: Array, size: Array) -> tuple[Array, Array]:
            """Returns the table index of the pair that begins at each place, and a key whose minimum in a segment is
            the next merge."""
            beside = jnp.minimum(place + size, T - 1)
            near = (place + size < count) & (segment[beside] == segment) & (symbols >= 0)
            slot, found = self._find(symbols, symbols[beside])
            # of equal ranks the first; ranks are below 2^20 and places below 2^11
            return slot, jnp.where(near & found, self.rank[slot] * T + place, NONE)

        def visit(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            symbols, size, slot, key = carry
            here = (key < NONE) & (key == jnp.full(T, NONE).at[segment].min(key)[segment])
            beside = jnp.where(here, place + size, T)
            grown = jnp.where(here, size + size[jnp.minimum(beside, T - 1)], size)
            symbols = jnp.where(here, self.merged[slot], symbols).at[beside].set(-1, mode="drop")
            return (symbols, grown, *pairs(symbols, grown))

        start = (byte, jnp.ones(T, jnp.int32))
        symbols, *_ = lax.while_loop(lambda c: (c[3] < NONE).any(), visit, (*start, *pairs(*start)))
        # a symbol that is no token falls back into its bytes
        owner = lax.cummax(jnp.where(symbols >= 0, place, 0))
        tokens = jnp.where(symbols[owner] >= V, byte, symbols)
        return jnp.where(tokens < V, tokens, -1), jnp.max(jnp.where(ends & (place < count), place, 0))

    def _segments(self, data: Array, count: Array) -> Array:
        """Returns True at the first byte of each segment, `bool[T]`."""
        place = jnp.arange(data.shape[0], dtype=jnp.int32)
        data = data.astype(jnp.int32)
        before, after = jnp.roll(data, 1), jnp.roll(data, -1)
        white = lambda x: (x == 9) | (x == 10) | (x == 13) | (x == 32)
        last = lambda hit: lax.cummax(jnp.where(hit, place, -1))
        rule = jnp.where(last(data == 10) > last(~white(data)), self.spaces[1], self.spaces[0])
        leaves = (data == 32) & white(before) & ~white(after) & (place + 1 < count) & rule
        return (place == 0) | ~self.joins[before, data] | leaves

    def _find(self, left: Array, right: Array) -> tuple[Array, Array]:
        """Returns the indices of pairs of symbols in the table, and True for pairs that are in it."""
        begin = self.buckets[_bucket(left, right, (self.buckets.shape[0] - 1).bit_length() - 1)]
        slots = begin[..., None] + jnp.arange(self.depth, dtype=jnp.int32)
        hit = (self.left[slots] == left[..., None]) & (self.right[slots] == right[..., None])
        return begin + jnp.argmax(hit, -1), hit.any(-1) & (left >= 0) & (right >= 0)


def append(items: Array, starts: Array, buffer: Array, count: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Appends the items of one row's tokens to the first `count` entries of a buffer, as far as there is space.

    Args:
        items: `[C]`, items of all tokens (bytes, or other tokens), one after the other.
        starts: `i32[V + 1]`, index of each token's first item.
        buffer: `[T]`, the buffer.
        count: `i32[]`, number of valid entries.
        tokens: `i32[W]`, the tokens; the first negative one ends them.

    Returns:
        The buffer, with the items of as many complete tokens as fit; the number of its valid entries; and the number of
        tokens that were appended.
    """
    place = jnp.arange(buffer.shape[0], dtype=jnp.int32)
    begin = starts[jnp.maximum(tokens, 0)]
    length = starts[jnp.maximum(tokens, 0) + 1] - begin
    ends = count + jnp.cumsum(length)
    taken = jnp.cumprod((tokens >= 0) & (ends <= buffer.shape[0])).sum(dtype=jnp.int32)
    total = jnp.where(taken > 0, ends[jnp.maximum(taken, 1) - 1], count)
    owner = jnp.cumsum(jnp.zeros(place.shape, jnp.int32).at[ends].add(1, mode="drop"))
    owner = jnp.minimum(owner, tokens.shape[0] - 1)
    new = items[jnp.clip((begin - ends + length)[owner] + place, 0, items.shape[0] - 1)]
    return jnp.where((place >= count) & (place < total), new, buffer), total, taken


def _bucket(left: Any, right: Any, bits: int) -> Any:
    """Returns a hash of two ids with `bits` bits, the same for NumPy and JAX."""
    unsigned = lambda x: x.astype(np.uint32)
    mixed = unsigned(left) * np.uint32(0x9E3779B1) + unsigned(right) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    return (mixed >> np.uint32(32 - bits)).astype(np.int32)


def _spaces(tokenizer: Any) -> np.ndarray:
    """Returns `ByteVocabulary.spaces`, determined from the tokenizer's own split into words."""
    splits = tokenizer.backend.pre_tokenizer
    if splits is None:
        return np.zeros(2, bool)
    begins = lambda text: {start for _, (start, _) in splits.pre_tokenize_str(text)}
    return np.array([3 in begins("x   y"), 5 in begins("x\n    y")])


def _is_character(word: bytes) -> bool:
    try:
        return len(word.decode()) == 1
    except UnicodeDecodeError:
        return False
