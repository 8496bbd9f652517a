"""Drafters of other sizes than the default: what changes, that they learn and draft, and what has no such size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.drafters import TrainedDrafter
from decodax.train.drafting.draft_model import masked_draft
from decodax.train.drafting.sizes import DrafterSize
from decodax.train.drafting.systems import SYSTEMS, first_weights, objective_of
from tests.laws.cases import VOCABULARY, lm
from tests.matrix import often

LAYERED = ("eagle-3", "p-eagle", "eagle", "fastmtp", "medusa", "hydra", "hydra-plus-plus", "clover", "dflash", "dspark")
WIDE = ("eagle-3", "p-eagle", "clover", "chimera", "falcon", "blockwise-parallel", "dflash", "glide",
        "mixture-of-attentions")
BATCH = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (2, 18)), jnp.int32)


def count(system: str, **size) -> int:
    head = objective_of(system, lm("llama"), size=DrafterSize(**size)).head
    return sum(x.size for x in jax.tree.leaves(head.abstract_params()))


def test_layers_and_widths_change_the_number_of_weights():
    for system in LAYERED:
        deep = [count(system, layers=n) for n in (1, 2, 3)]
        if system in ("medusa", "hydra"):       # their blocks after the first are one, with its weights
            assert deep[0] <= deep[1] == deep[2], system
            assert objective_of(system, lm("llama"), size=DrafterSize(layers=3)).head.blocks == 3
        else:
            assert deep[0] < deep[1] < deep[2], system
    for system in WIDE:
        assert count(system, mlp=16) < count(system, mlp=32), system


@pytest.mark.wide
@pytest.mark.parametrize("system", often(["eagle-3", "clover"], [*LAYERED]))
def test_a_deeper_drafter_learns_and_drafts(system):
    target = lm("llama")
    objective = objective_of(system, target, drafts=3, size=DrafterSize(layers=3))
    first = first_weights(objective, target, jax.random.key(0))
    loss, slope = jax.jit(jax.value_and_grad(lambda w: objective(w, BATCH, target.params)[0]))(first)
    assert np.isfinite(loss)
    moved = jax.tree.map(lambda w, g: w - 1e-2 * g, first, slope)
    assert objective(moved, BATCH, target.params)[0] < loss
    entry = {"fastmtp": "mtp"}.get(system, system)
    drafter = TrainedDrafter(entry, objective.head, first)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    plain, out = (dx.generate(target, prompts, max_new_tokens=6, temperature=0.0, eos_token_id=[], **more)
                  for more in ({}, {"algorithm": entry, "draft": drafter}))
    assert np.array_equal(plain.tokens, out.tokens)


@pytest.mark.wide
def test_the_targets_last_layers_run_after_a_mixture_of_attentions():
    target = lm("llama")
    objective = objective_of("mixture-of-attentions", target, size=DrafterSize(above=1))
    assert objective.head.above == 1
    first = first_weights(objective, target, jax.random.key(0))
    assert np.isfinite(jax.jit(objective)(first, BATCH, target.params)[0])
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    drafter = TrainedDrafter("mixture-of-attentions", objective.head, first)
    plain, out = (dx.generate(target, prompts, max_new_tokens=6, temperature=0.0, eos_token_id=[], **more)
                  for more in ({}, {"algorithm": "mixture-of-attentions:length=2,nodes=4,width=2", "draft": drafter}))
    assert np.array_equal(plain.tokens, out.tokens)
    with pytest.raises(ValueError, match="the head runs the last 9 layers of its target"):
        objective_of("mixture-of-attentions", target, size=DrafterSize(above=9))


def test_stacked_heads_are_as_many_as_the_drafts():
    assert [objective_of("medusa", lm("llama"), drafts=n).head.heads for n in (2, 7)] == [2, 7]


def test_sizes_that_a_drafter_does_not_have_are_refused():
    with pytest.raises(ValueError, match="layers: got 0, takes at least 1"):
        DrafterSize(layers=0)
    fixed = [("layers", "chimera"), ("layers", "glide"), ("layers", "ppd"), ("mlp", "medusa"), ("above", "glide")]
    for name, system in fixed:
        with pytest.raises(ValueError, match=f"{name}: got 2, '{system}' takes none: its drafter has a fixed number"):
            objective_of(system, lm("llama"), size=DrafterSize(**{name: 2}))
    target = lm("llama")
    with pytest.raises(ValueError, match="mlp: got 8, 'pard' takes none with this draft model"):
        masked_draft(target, "pard", size=DrafterSize(mlp=8))
    with pytest.raises(ValueError, match="layers: got 99, takes at most the"):
        masked_draft(target, "pard", size=DrafterSize(layers=99))
    assert masked_draft(target, "pard", size=DrafterSize(layers=2)).draft.model.depth == 2
    assert set(LAYERED) | set(WIDE) <= SYSTEMS.keys()
