"""Blocks of masks after a causal text: SDLM's self-speculative mode writes what the model predicts at the first place
of its blocks, one token after the other, and LUD what it is sure of at placeholders."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import algorithms
from decodax.algorithms.speculative.trees import Chain
from decodax.models import Diffusion
from tests.laws.cases import MASK, VOCABULARY, model, prompts

SIZE, NEW, LONGEST = 4, 12, 48


def of(attention):
    network, weights = model("llama")
    return dx.LM(network, weights, VOCABULARY, diffusion=Diffusion(MASK, True, attention, SIZE))


@functools.cache
def forward():
    network, weights = model("llama")
    return jax.jit(lambda tokens, positions, mask: network.forward(weights, tokens, positions, mask))


def first_of_block(text, ordered):
    """The model's likeliest token after a text, by a block of a copy of its last token and masks."""
    place, at = np.arange(LONGEST), len(text)
    tokens = np.full(LONGEST, MASK)
    tokens[:at], tokens[at] = text, text[-1]
    block = (place >= at) & (place < at + SIZE)
    inside = block & (place[None] <= place[:, None]) if ordered else block
    sees = np.where(block[:, None], (place < at - 1) | inside, place[None] <= place[:, None])
    positions = np.where(place < at, place, place - 1)
    logits = forward()(*(jnp.asarray(x)[None] for x in (tokens, positions, sees)))[0, at]
    return int(logits.at[MASK].set(-jnp.inf).argmax())


@pytest.mark.wide(but=("causal-prefix",))
@pytest.mark.parametrize("attention", ["causal-prefix", "causal"])
def test_drafts_at_masks_are_verified_by_blocks_of_their_own(attention):
    ids = prompts(3)
    out = dx.generate(of(attention), ids, algorithm="sdlm:self_speculative=true", max_new_tokens=NEW, eos_token_id=[])
    for row, text in enumerate(ids):
        text = list(text)
        for _ in range(NEW):
            text.append(first_of_block(text, attention == "causal"))
        assert out.row(row).tolist() == text[-NEW:]
    assert np.sum(out.stats.accepted) > 0


@pytest.mark.wide
def test_a_sampled_text_does_not_depend_on_the_length_of_drafts():
    lm, ids = of("causal-prefix"), prompts(4)
    alg = algorithms.make("sdlm", lm, self_speculative=True)
    one, all_ = (dx.generate(lm, ids, algorithm=dataclasses.replace(alg, shape=Chain(n)), max_new_tokens=NEW, seed=3,
                             temperature=0.8, repetition_penalty=1.2, eos_token_id=[]) for n in (1, SIZE - 1))
    assert one.tokens.tolist() == all_.tokens.tolist() and all_.stats.forwards <= one.stats.forwards


def test_the_mode_is_refused_for_other_models():
    network, weights = model("llama")
    full = dx.LM(network, weights, VOCABULARY, diffusion=Diffusion(MASK))
    with pytest.raises(ValueError, match=r"self_speculative: got True for Full\(\), takes it with causal-prefix"):
        algorithms.make("sdlm", full, self_speculative=True)
    with pytest.raises(ValueError, match="size: got 1, takes 2 or more"):
        algorithms.make("sdlm", of("causal-prefix"), size=1, self_speculative=True)


def test_lud_keeps_the_first_tokens_that_are_sure():
    """Against the rule by hand: the model on the text and three copies of an ordinary token, which may be predicted."""
    network, weights = model("llama")
    lm, ids, placeholder, seen = dx.LM(network, weights, VOCABULARY), prompts(3), 4, set()
    out = dx.generate(lm, ids, algorithm=f"lud:length=3,threshold=0.12,placeholder={placeholder}", max_new_tokens=NEW,
                      eos_token_id=[])
    sees = np.tril(np.ones((LONGEST, LONGEST), bool))
    for row, text in enumerate(ids):
        text = list(text)
        while len(text) < len(ids[row]) + NEW:
            tokens = np.full(LONGEST, placeholder)
            tokens[:len(text)] = text
            logits = forward()(*(jnp.asarray(x)[None] for x in (tokens, np.arange(LONGEST), sees)))[0]
            p = np.asarray(jax.nn.softmax(logits))[len(text) - 1:len(text) + 3]
            kept = max(1, int(np.cumprod(p.max(1) > 0.12).sum()))
            text += p[:kept].argmax(1).tolist()
            seen.add(kept)
        assert out.row(row).tolist() == text[len(ids[row]):][:NEW]
    assert len(seen) > 2 and placeholder in out.tokens


def test_lud_is_for_models_that_read_from_left_to_right():
    network, weights = model("llama")
    with pytest.raises(ValueError, match="placeholder: got 16, takes an id below 16"):
        algorithms.make("lud", dx.LM(network, weights, VOCABULARY), placeholder=16)
    fills = dx.LM(network, weights, VOCABULARY, diffusion=Diffusion(MASK))
    with pytest.raises(ValueError, match=r"algorithm: got MaskedDiffusion for .* fills masks"):
        dx.generate(fills, [[1, 2]], algorithm="lud:placeholder=0", max_new_tokens=2)
