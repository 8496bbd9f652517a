"""Training goes on from a drafter that was trained before, if it has the shape that the options say."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import decodax as dx
from decodax.io.drafters import TrainedDrafter, save_drafter
from decodax.models.drafters.stack import MLPSpeculatorHead
from decodax.train.drafting.draft_model import masked_draft
from decodax.train.drafting.sizes import DrafterSize
from decodax.train.drafting.start import load_start, started
from decodax.train.drafting.systems import SYSTEMS, objective_of
from tests.laws.cases import VOCABULARY, lm

SOME = np.array([2, 3, 5, 7])


def before(system, directory, ids=None, **more):
    """A drafter of a method with random weights, as it is written and read again, and its objective."""
    objective = objective_of(system, lm("llama"), ids, **more)
    params = objective.head.init_params(jax.random.key(3))
    save_drafter(directory, TrainedDrafter(system, objective.head, params, ids), "float32")
    return load_start(str(directory), lm("llama")), objective, params


@pytest.mark.wide(but=("medusa", "mumo", "eagle-3"))
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_drafter_of_every_method_is_one_to_start_from(system, tmp_path):
    ids = np.array([[2, 3, -1], [5, 7, 9]]) if system == "mumo" else SOME if SYSTEMS[system].share < 1 else None
    drafter, objective, params = before(system, tmp_path, ids)
    again, first = started(objective_of(system, lm("llama"), drafter.ids), drafter)
    assert again == objective
    assert all(map(np.array_equal, *map(jax.tree.leaves, (first, params))))


def test_the_layers_that_a_drafter_reads_stay_those_that_it_was_trained_with(tmp_path):
    drafter, _, _ = before("eagle-3", tmp_path, SOME)
    drafter = dataclasses.replace(drafter, head=dataclasses.replace(drafter.head, taps=(1, 0)))
    assert started(objective_of("eagle-3", lm("llama"), SOME), drafter)[0].head.taps == (1, 0)
    drafter, _, _ = before("hidden-transfer", tmp_path / "transfer")
    with pytest.raises(ValueError, match=r"with taps \(.*\), takes one with \(0,\), as the options say"):
        started(objective_of("hidden-transfer", lm("llama"), size=DrafterSize(at=(0,))), drafter)


@pytest.mark.parametrize("system", ["eagle-3", "p-eagle", "dflash", "dflash2"])
def test_a_published_drafter_says_what_no_option_sets(system, tmp_path):
    """Their readers set the width of features and the size of the table, and a block's mask is a token."""
    drafter, _, params = before(system, tmp_path, SOME if SYSTEMS[system].share < 1 else None)
    head = dataclasses.replace(drafter.head, feature_width=drafter.head.config.width)
    if hasattr(head, "table_size"):
        head = dataclasses.replace(head, table_size=VOCABULARY)
    if system.startswith("dflash"):
        head, params = dataclasses.replace(head, mask=5), {name: x for name, x in params.items() if name != "mask"}
    objective, first = started(objective_of(system, lm("llama"), drafter.ids),
                               dataclasses.replace(drafter, head=head, params=params))
    assert objective.head == head and first.keys() == params.keys()


def test_hass_starts_from_eagle_and_layers_keep_their_own_options(tmp_path):
    drafter, _, _ = before("eagle", tmp_path)
    config = dataclasses.replace(drafter.head.config, context=99)
    drafter = dataclasses.replace(drafter, head=dataclasses.replace(drafter.head, config=config))
    assert started(objective_of("hass", lm("llama")), drafter)[0].head.config.context == 99


def test_a_drafter_of_another_shape_is_refused(tmp_path):
    own = dict(size=DrafterSize(own_head=True))
    drafter, _, _ = before("medusa", tmp_path / "medusa", **own)
    cases = [("hydra", {}, "with a MedusaHead, takes one with a HydraHead"),
             ("medusa", {}, "with own_head True, takes one with False, as the options say"),
             ("medusa", dict(drafts=2, **own), "with heads 4, takes one with 2, as the options say")]
    for system, more, words in cases:
        with pytest.raises(ValueError, match=f"^start: got '.*/medusa' {words}"):
            started(objective_of(system, lm("llama"), **more), drafter)
    some, _, _ = before("medusa", tmp_path / "some", SOME, **own)
    with pytest.raises(ValueError, match="which predicts other tokens than the objective"):
        started(objective_of("medusa", lm("llama"), SOME + 1, **own), some)
    with pytest.raises(ValueError, match=r"^draft_vocab: got 5, and '.*/some' predicts 4 tokens"):
        load_start(str(tmp_path / "some"), lm("llama"), 5)
    wide, _, _ = before("eagle", tmp_path / "wide", size=DrafterSize(mlp=40))
    with pytest.raises(ValueError, match=r"whose weight '.*' has the shape \(.*40.*\), takes \(.*24.*\)"):
        started(objective_of("eagle", lm("llama")), wide)


def test_the_second_phase_of_an_mlp_speculator_starts_from_a_published_file(tmp_path):
    """The layout of IBM's files: tied weights, an own width and embeddings."""
    rng = np.random.default_rng(0)
    shapes = {"emb": (VOCABULARY, 12), "head": (VOCABULARY, 12), "ln.weight": (12,), "ln.bias": (12,)}
    tied = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    later = rng.standard_normal((12, 12), np.float32)
    tensors = {}
    for i in range(4):
        for part in ("emb", "head"):
            tensors[f"speculator.{part}.{i}.weight"] = tied[part]
        for kind in ("weight", "bias"):
            tensors[f"speculator.ln.{i}.{kind}"] = tied[f"ln.{kind}"]
        tensors[f"speculator.proj.{i}.weight"] = later if i else rng.standard_normal((12, 16), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="mlp_speculator", emb_dim=16, vocab_size=VOCABULARY, n_predict=4, inner_dim=12, tie_weights=True,
        scale_input=True, top_k_tokens_per_head=[4, 3, 2, 2], n_candidates=5)))
    size = DrafterSize(own_head=True, mlp=12, tied=True, scale_input=True)
    objective, first = started(objective_of("mlp-speculator", lm("llama"), size=size),
                               load_start(str(tmp_path), lm("llama")))
    assert isinstance(objective.head, MLPSpeculatorHead) and objective.head.inner == 12
    assert np.array_equal(first["embed"]["0"]["table"], tied["emb"])


@pytest.mark.parametrize("system", ["pard", "pard-2"])
def test_a_tuned_draft_model_is_tuned_further_with_its_mask_and_projection(system, tmp_path):
    target = dataclasses.replace(lm("llama"), tokenizer=None)
    size = DrafterSize(layers=1)
    made = masked_draft(target, system, mask=3, size=size, seed=5)
    made.save(tmp_path, made.first, {})
    again = masked_draft(target, system, start=str(tmp_path))
    assert again.objective == made.objective and again.objective.mask == 3
    for x, y in zip(jax.tree.leaves(again.first), jax.tree.leaves(made.first), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2)         # stored in bfloat16
    with pytest.raises(ValueError, match=r"^mask: got 4, and '.*' was tuned with 3"):
        masked_draft(target, system, mask=4, start=str(tmp_path))
    with pytest.raises(ValueError, match=r"^start: got '.*' and the draft model 'x', takes one of them"):
        masked_draft(target, system, "x", start=str(tmp_path))
    if system == "pard-2":
        assert np.array_equal(again.first["projection"]["weight"], made.first["projection"]["weight"])
    assert dx.load(tmp_path).vocab_size == VOCABULARY
