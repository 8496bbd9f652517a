"""Keys and values of texts that are read apart, edited and put together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches import Prefix, blended, edited, matched, read_prefix
from decodax.caches.rotation import moved
from decodax.models.rope import Rope, Yarn, rotate
from tests.caches.small import DEEP, LOOKUP, PROMPTS, network

pytestmark = pytest.mark.wide

LAYERS = network(3)
TEXT = PROMPTS[0]
QUESTIONS = [[3, 1, 4, 1], [5, 9], [2, 6, 5, 3, 5, 8, 9]]
SAMPLED: dict[str, Any] = dict(max_new_tokens=12, temperature=[0.0, 0.9, 0.0], seed=5)


def close(one: Prefix, other: Prefix, tokens: slice = slice(None)) -> bool:
    return one.tokens == other.tokens and all(
        np.allclose(a[:, tokens], b[:, tokens], atol=1e-4) for a, b in zip(one.kv, other.kv, strict=True))


@pytest.mark.parametrize("cache", [None, "kivi:group_size=4,residual_length=8"])
def test_a_prefix_is_a_context_that_was_read(cache: Any) -> None:
    held = read_prefix(DEEP, TEXT)
    texts, brought = (dx.generate(DEEP, QUESTIONS, context=context, cache=cache, algorithm=LOOKUP, **SAMPLED)
                      for context in (TEXT, held))
    assert brought.tokens.tolist() == texts.tokens.tolist()


def test_one_batch_has_prefixes_of_any_lengths() -> None:
    texts, brought = (dx.generate(DEEP, QUESTIONS, context=context, batch_size=2, **SAMPLED)
                      for context in (PROMPTS, [read_prefix(DEEP, text) for text in PROMPTS]))
    assert brought.tokens.tolist() == texts.tokens.tolist()


def test_an_edit_at_the_end_is_the_text_read_anew_and_one_before_moves_the_rest() -> None:
    held, new = read_prefix(DEEP, TEXT), [1, 2, 3]
    assert close(edited(DEEP, held, 30, len(TEXT), new), read_prefix(DEEP, TEXT[:30] + new))
    own = edited(DEEP, held, 10, 12, new)
    again = read_prefix(DEEP, TEXT[:10] + new + TEXT[12:])
    assert close(own, again, slice(13)) and not close(own, again)
    # values behind are those of before, and keys have the products with queries that stand as far from them
    np.testing.assert_array_equal(own.kv[1][:, 13:, 4:], held.kv[1][:, 12:, 4:])
    back = edited(DEEP, own, 10, 13, TEXT[10:12])
    assert close(back, held)


def test_first_layers_need_no_history_so_a_moved_key_is_the_one_at_its_new_place() -> None:
    """Keys of the first layer see their own token alone."""
    own, again = edited(DEEP, read_prefix(DEEP, TEXT), 5, 5, [7] * 9), read_prefix(DEEP, TEXT[:5] + [7] * 9 + TEXT[5:])
    np.testing.assert_allclose(own.kv[0], again.kv[0], atol=1e-4)


@pytest.mark.parametrize("scaling", [None, Yarn(4.0, 64)])
def test_turns_add_up(scaling: Any) -> None:
    """With YaRN's factor, too."""
    rope = Rope(8, scaling=scaling)
    shape, x = KVLayer(2, 8, rope=rope), jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    at = lambda *places: rotate(x, *rope.table(jnp.array([places]), None))
    by = jnp.array([[6, -3, 40]])
    np.testing.assert_allclose(moved(shape, at(2, 5, 1), by), at(8, 2, 41), atol=1e-4)


def test_a_blend_that_computes_all_is_the_text_read_anew() -> None:
    parts = [read_prefix(DEEP, text) for text in PROMPTS]
    whole = read_prefix(DEEP, [*PROMPTS[0], *PROMPTS[1], *PROMPTS[2], 4, 4])
    assert close(blended(DEEP, [*parts, [4, 4]], 1.0, check=0), whole)
    nothing = blended(DEEP, [*parts, [4, 4]], 0.0, check=0)
    np.testing.assert_allclose(nothing.kv[0], whole.kv[0], atol=1e-4)


def test_a_blend_is_nearer_to_the_text_the_more_of_it_is_computed() -> None:
    """In the layer behind the one that is checked, which is the second: values of the first do not depend on what is
    before them."""
    parts = [read_prefix(LAYERS, text) for text in PROMPTS]
    whole = read_prefix(LAYERS, [*PROMPTS[0], *PROMPTS[1], *PROMPTS[2], 4, 4])
    off = [float(np.square(blended(LAYERS, [*parts, [4, 4]], share).kv[2] - whole.kv[2]).sum())
           for share in (1.0, 0.3, 0.0)]
    assert off[0] < 1e-3 < off[1] < off[2]


def test_a_blend_chooses_by_values_and_computes_the_chosen_from_the_blend() -> None:
    """Against the rule in NumPy, for a network whose second layer is checked."""
    parts = [read_prefix(LAYERS, text) for text in PROMPTS[:2]]
    text = PROMPTS[0] + PROMPTS[1]
    whole, own = read_prefix(LAYERS, text), blended(LAYERS, parts, 0.25)
    for layer in (0, 1):
        np.testing.assert_allclose(own.kv[layer], whole.kv[layer], atol=1e-4)
    stored = np.concatenate([part.kv[1] for part in parts], 1)
    apart = np.square(whole.kv[1] - stored)[..., 4:].sum((0, 2))
    chosen = np.sort(np.argsort(-apart, kind="stable")[:int(len(text) * 0.25)])
    old = np.concatenate([part.kv[2] for part in parts], 1)[..., 4:]
    changed = np.flatnonzero((np.abs(own.kv[2][..., 4:] - old) > 1e-6).any((0, 2)))
    assert set(changed) <= set(chosen) and len(changed) > len(chosen) / 2
    # what enters the third layer of the chosen ones is right, since two layers were computed whole
    np.testing.assert_allclose(own.kv[2][:, chosen], whole.kv[2][:, chosen], atol=1e-4)


def test_a_text_like_another_one_is_cut_into_what_is_there_and_what_is_new() -> None:
    held = read_prefix(DEEP, TEXT)
    like = [*TEXT[5:20], 3, 3, 3, *TEXT[22:]]
    parts = matched(held, like)
    assert [len(part) for part in parts] == [15, 3, 19]
    assert [x for part in parts for x in (part.tokens if isinstance(part, Prefix) else part)] == like
    own, whole = blended(DEEP, parts, 1.0, check=0), read_prefix(DEEP, like)
    assert close(own, whole)


def test_a_part_of_a_part_is_a_part_of_the_whole() -> None:
    held = read_prefix(DEEP, TEXT)
    inner, own = held[2:20][3:9], held[5:11]
    assert inner.begin == own.begin == 5
    assert close(blended(DEEP, [[3], inner], 0.0), blended(DEEP, [[3], own], 0.0))


def test_bad_arguments_are_refused_by_name() -> None:
    held = read_prefix(DEEP, TEXT)
    for expected, wrong in (
            (r"^context: got keys and values that were computed before; Evicting has to see",
             lambda: dx.generate(DEEP, QUESTIONS, context=held, cache="snapkv:budget=14,window_size=4")),
            (r"^context: got a prefix of 2 layers", lambda: dx.generate(LAYERS, QUESTIONS, context=held)),
            (r"^context: got a part of a prefix that began elsewhere",
             lambda: dx.generate(DEEP, QUESTIONS, context=held[3:])),
            (r"^start, stop: got 3 to 99", lambda: edited(DEEP, held, 3, 99, [])),
            (r"^recompute: got 2", lambda: blended(DEEP, [held], 2)),
            (r"^check: got 2, takes one of 2", lambda: blended(DEEP, [held], check=2)),
            (r"^text: got no tokens", lambda: read_prefix(DEEP, []))):
        with pytest.raises(ValueError, match=expected):
            wrong()
