"""Drafters of other sizes than the default: what changes, that they learn and draft, and what has no such size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import causal
from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.models.formats import pack
from decodax.train.drafting.draft_model import masked_draft
from decodax.train.drafting.features import target_outputs
from decodax.train.drafting.sizes import DrafterSize
from decodax.train.drafting.systems import SYSTEMS, feature_weight, first_weights, objective_of, vocabulary
from decodax.train.drafting.unrolled import mean_square, smooth_l1, unrolled
from tests.laws.cases import VOCABULARY, lm
from tests.matrix import often

LAYERED = ("eagle-3", "p-eagle", "eagle", "fastmtp", "medusa", "hydra", "hydra-plus-plus", "clover", "dflash", "dspark")
WIDE = ("eagle-3", "p-eagle", "clover", "chimera", "falcon", "blockwise-parallel", "dflash", "glide",
        "mixture-of-attentions")
BATCH = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (2, 18)), jnp.int32)


PUBLISHED = {
    **dict.fromkeys(("medusa", "hydra", "hydra-plus-plus", "chimera"), DrafterSize(own_head=True)),
    "mlp-speculator": DrafterSize(own_head=True, mlp=24, tied=True, scale_input=True),
    "ppd": DrafterSize(ensemble=2), "hidden-transfer": DrafterSize(at=(0, 0, 1))}
"""Sizes that published drafters have, or that their papers choose."""


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


def learns_and_drafts(system, size, drafts=3, entry=None):
    """A step lowers the loss of a drafter of a size, and it changes no output."""
    target = lm("llama")
    objective = objective_of(system, target, drafts=drafts, size=size)
    first = first_weights(objective, target, jax.random.key(0))
    loss, slope = jax.jit(jax.value_and_grad(lambda w: objective(w, BATCH, target.params)[0]))(first)
    assert np.isfinite(loss)
    moved = jax.tree.map(lambda w, g: w - 1e-2 * g, first, slope)
    assert objective(moved, BATCH, target.params)[0] < loss
    entry = entry or {"fastmtp": "mtp"}.get(system, system)
    drafter = TrainedDrafter(entry, objective.head, first)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    plain, out = (dx.generate(target, prompts, max_new_tokens=6, temperature=0.0, eos_token_id=[], **more)
                  for more in ({}, {"algorithm": entry, "draft": drafter}))
    assert np.array_equal(plain.tokens, out.tokens)
    return drafter


@pytest.mark.wide
@pytest.mark.parametrize("system", often(["eagle-3", "clover"], [*LAYERED]))
def test_a_deeper_drafter_learns_and_drafts(system):
    learns_and_drafts(system, DrafterSize(layers=3))


@pytest.mark.wide
@pytest.mark.parametrize("system", often(["medusa", "mlp-speculator", "ppd"], PUBLISHED))
def test_a_drafter_like_published_ones_learns_drafts_and_is_read_again(system, tmp_path):
    made = learns_and_drafts(system, PUBLISHED[system])
    save_drafter(tmp_path, made, "float32")
    again = dx.load_drafter(tmp_path, lm("llama"))
    assert again.head == made.head
    assert all(map(np.array_equal, *map(jax.tree.leaves, (again.params, made.params))))


@pytest.mark.parametrize("kind", ["plain", "scaled", "packed"])
def test_a_fresh_medusa_head_with_its_own_matrix_predicts_what_the_target_does(kind):
    target = lm("llama")
    if kind == "scaled":
        config = dataclasses.replace(target.model.config, logit_scale=0.5)
        target = dataclasses.replace(target, model=dataclasses.replace(target.model, config=config))
    if kind == "packed":
        target = dataclasses.replace(target, params=pack(target.params, "int8"))
    objective = objective_of("medusa", target, size=DrafterSize(own_head=True))
    first = first_weights(objective, target, jax.random.key(0))
    logits, features = target_outputs(target.model, objective.head, target.params, BATCH, "float32")
    for own, _ in unrolled(target.model, objective.head, first, target.params, BATCH, features, 4):
        np.testing.assert_allclose(own, logits, atol=2e-5)


def test_vocabulary_matrices_begin_as_the_targets_and_may_predict_some_of_its_tokens():
    target, own = lm("llama"), DrafterSize(own_head=True)
    kernel, bias = vocabulary(target)
    some = np.array([2, 3, 5, 7])
    for system, ids in (("medusa", None), ("medusa", some), ("hydra", some), ("chimera", some)):
        objective = objective_of(system, target, ids, size=own)
        first, wanted = first_weights(objective, target, jax.random.key(0)), kernel if ids is None else kernel[:, ids]
        for head in first["heads"].values():
            found = head["kernel"] if system == "chimera" else head["head"]["kernel"]
            assert np.array_equal(found, np.concatenate([wanted] * (1 + (system == "chimera")))), system
    assert np.array_equal(bias, np.zeros(VOCABULARY))
    with pytest.raises(ValueError, match="takes None: 'mlp-speculator' also reads tokens by a table"):
        objective_of("mlp-speculator", target, some, size=own)


def test_six_levels_of_a_mixture_of_attentions_are_trained_as_the_entry_drafts_six():
    objective = objective_of("mixture-of-attentions", lm("llama"))
    drafter = TrainedDrafter("mixture-of-attentions", objective.head, objective.head.init_params(jax.random.key(0)))
    algorithm = dx.algorithms.make("mixture-of-attentions", lm("llama"), drafter)
    assert objective.steps == algorithm.shape.length == 6


def test_pseudo_states_of_hidden_transfer_may_learn_the_targets_states():
    """The loss has the mean squared distance between each state where it begins and the state of the token that it
    stands for, at every place of the text."""
    target, at = lm("llama"), (0, 0, 1)
    objectives = [objective_of("hidden-transfer", target, size=DrafterSize(at=at), hidden_weight=weight)
                  for weight in (None, 0.0, 2.0)]
    first = first_weights(objectives[0], target, jax.random.key(0))
    plain, none, found = (float(objective(first, BATCH, target.params)[0]) for objective in objectives)
    tokens = BATCH[:, :-1]
    out = target.model.apply(target.params, causal(tokens, jnp.zeros(2, jnp.int32)), target.model.init_cache(2, 0))
    distance, T = [], tokens.shape[1]
    for j, layer in enumerate(at):
        x = np.asarray(out.layers[layer])
        places = np.arange(T - 2)
        places = places[places + 1 + j < T]         # all of them, since there are fewer than 64
        made = x[:, places] @ np.asarray(first["maps"][j])
        distance.append(np.square(made - x[:, places + 1 + j]).mean())
    shares = 0.8 ** np.arange(3)
    assert none == plain
    assert found == pytest.approx(plain + 2.0 * np.dot(distance, shares / shares.sum()), rel=1e-5)


def test_chimera_compares_hidden_states_by_squares_and_eagle_by_smooth_l1():
    target = lm("llama")
    objective = objective_of("chimera", target)
    assert objective.distance is mean_square and objective_of("eagle", target).distance is smooth_l1
    first = first_weights(objective, target, jax.random.key(0))
    without, found = (float(dataclasses.replace(objective, features=x, steps=1)(first, BATCH, target.params)[0])
                      for x in (0.0, 3.0))
    tokens = BATCH[:, :-1]
    _, features = target_outputs(target.model, objective.head, target.params, tokens, "float32")
    _, hidden = unrolled(target.model, objective.head, first, target.params, tokens, features, 1)[0]
    far = np.square(hidden[:, :-1, :16] - features[:, 1:]).mean()
    assert found == pytest.approx(without + 3 * far, rel=1e-5)
    assert feature_weight("medusa", None) == 0 and feature_weight("eagle", None) == 10
    for system in ("medusa", "pard", "specdec"):
        with pytest.raises(ValueError, match=f"hidden_weight: got 1.0 for '{system}', takes None"):
            feature_weight(system, 1.0)
    with pytest.raises(ValueError, match=r"hidden_weight: got -1\.0 for 'eagle', takes a number of at least 0"):
        objective_of("eagle", target, hidden_weight=-1.0)


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
    for name, value, system in (("own_head", True, "eagle-3"), ("own_head", True, "clover"), ("tied", True, "medusa"),
                                ("scale_input", True, "hydra"), ("ensemble", 2, "pass"), ("at", (0,), "ppd"),
                                ("encoder_layers", 2, "medusa")):
        with pytest.raises(ValueError, match=f"{name}: got .*, '{system}' takes none: its drafter has"):
            objective_of(system, lm("llama"), size=DrafterSize(**{name: value}))
    with pytest.raises(ValueError, match="mlp: got 24 with the target's matrices, whose width is 16"):
        objective_of("mlp-speculator", lm("llama"), size=DrafterSize(mlp=24))
    with pytest.raises(ValueError, match=r"at: got \(0, 2\), takes layers of .* from 0 to 1"):
        objective_of("hidden-transfer", lm("llama"), size=DrafterSize(at=(0, 2)))
    with pytest.raises(ValueError, match="ascending order"):
        objective_of("hidden-transfer", lm("llama"), size=DrafterSize(at=(1, 0)))
    target = lm("llama")
    with pytest.raises(ValueError, match="own_head: got True, 'pard' takes none"):
        masked_draft(target, "pard", size=DrafterSize(own_head=True))
    with pytest.raises(ValueError, match="mlp: got 8, 'pard' takes none with this draft model"):
        masked_draft(target, "pard", size=DrafterSize(mlp=8))
    with pytest.raises(ValueError, match="layers: got 99, takes at most the"):
        masked_draft(target, "pard", size=DrafterSize(layers=99))
    assert masked_draft(target, "pard", size=DrafterSize(layers=2)).draft.model.depth == 2
    assert set(LAYERED) | set(WIDE) <= SYSTEMS.keys()


def test_options_that_a_drafter_does_not_read_are_refused():
    with pytest.raises(ValueError, match=r"^at: got \(0, 1\), takes at most 1 layers, one for each draft"):
        objective_of("hidden-transfer", lm("llama"), drafts=1, size=DrafterSize(at=(0, 1)))
    with pytest.raises(ValueError, match=r"^drafts, loss: got 3 and None, takes None: 'mumo' drafts units"):
        objective_of("mumo", lm("llama"), np.array([[2, 3, -1], [5, 7, 9]]), drafts=3)
