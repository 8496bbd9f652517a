"""Block heads in published layouts: the logits of the public code, and files that leave something open."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from decodax.io.drafters import load_drafter, save_drafter
from decodax.io.drafters.dflash import read, shared_tables, sources
from decodax.io.drafters.tensors import Tensors
from decodax.io.files import CheckpointError, write_files
from decodax.models import llama
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.block_training import blocks_at
from decodax.models.drafters.corrections import CandidateSelector, Markov, PrefixGRU, Refiner
from decodax.models.drafters.local_convolution import LocalConvolution
from decodax.models.names import flatten
from tests.drafters import given

PUBLIC = json.loads((Path(__file__).parent / "speculators.json").read_text())
CASES = {case["name"]: case for case in PUBLIC["cases"]}


def block(taps=(1, 4), **settings):
    """A head over 24 tokens, as Qwen3's layers are."""
    config = llama(vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24, context=2048, eps=1e-6)
    return BlockHead(taps, 24, config=dataclasses.replace(config, qk_norm="head"), block=4, mask=23, feature_width=16,
                     target_vocab=24, **settings)


@functools.cache
def loaded(name):
    case = CASES[name]
    tensors = given.tensors(case["shapes"])
    if case["config"]["draft_vocab_size"] < PUBLIC["vocabulary"]:
        tensors["t2d"] = np.arange(PUBLIC["vocabulary"]) % 2 == 0
        tensors["t2d"][-4:] = False
        tensors["d2t"] = np.flatnonzero(tensors["t2d"]) - np.arange(10)
    return read(tensors, case["config"])


@pytest.mark.wide
@pytest.mark.parametrize("name", list(CASES))
def test_logits_are_those_of_the_public_code(name):
    case, (head, weights, ids) = CASES[name], loaded(name)
    assert head.taps == (0, 2)          # the file counts from the embeddings
    features, tokens = given.inputs(PUBLIC["positions"], PUBLIC["features"], PUBLIC["vocabulary"])
    out = blocks_at(head, weights, jnp.asarray(features), jnp.asarray(tokens), jnp.asarray([PUBLIC["anchors"]]),
                    None, None)
    wanted = np.asarray(case["logits"], np.float32)
    wanted = np.where(wanted < -1e8, -np.inf, wanted)
    assert out.logits.shape[1:] == wanted.shape
    np.testing.assert_allclose(out.logits[0], wanted, atol=1e-5, rtol=1e-5)
    if "chance" in case:
        np.testing.assert_allclose(out.chance[0], case["chance"], atol=1e-5, rtol=1e-5)
    assert (ids is None) == (head.vocab == PUBLIC["vocabulary"])


LAYERS = dict(model_type="qwen3", hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
              intermediate_size=24, num_hidden_layers=2, vocab_size=24, rope_theta=10000.0, rms_norm_eps=1e-6)
BODY = dict(LAYERS, architectures=["DFlashDraftModel"], block_size=4, num_target_layers=8)
OWN = dict(mask_token_id=23, target_layer_ids=[1, 4])
Z_LAB = BODY | dict(dflash_config=OWN)
"""A file of Z Lab or SpecForge."""
LAYOUTS = {
    "dflash": (Z_LAB, block()),
    "dflash-defaults": (BODY | dict(dflash_config=dict(mask_token_id=23)), block(taps=(1, 5))),
    "jetspec": (BODY | dict(dflash_config=OWN | dict(causal_head=True)), block(causal=True)),
    "specforge-dspark": (BODY | dict(architectures=["DSparkDraftModel"], dflash_config=OWN | dict(
        projector_type="dspark", markov_rank=6, markov_head_type="gated")),
        block(first_predicts=True, correction=Markov(6, "gated"), confidence="hidden")),
    "deepspec-dspark": (BODY | OWN | dict(architectures=["Qwen3DSparkModel"], markov_rank=6, num_anchors=9,
                                          markov_head_type="vanilla", enable_confidence_head=True),
                        block(first_predicts=True, correction=Markov(6), confidence="token", own_head=True,
                              own_table=True)),
    "deepspec-dflash": (BODY | OWN | dict(architectures=["Qwen3DSparkModel"], markov_rank=0, num_anchors=9),
                        block(first_predicts=True, own_head=True, own_table=True)),
    "domino": (BODY | dict(architectures=["DominoDraftModel"], dflash_config=OWN | dict(
        projector_type="domino", emb_dim=5, gru_hidden_dim=7, pure_draft_prefix_len=1, shift_label=True)),
        block(first_predicts=True, correction=PrefixGRU(7, 5, 1))),
    "dflash2": (BODY | dict(dflash_config=OWN | dict(selector_rank=6, selector_top_k=5)),
                block(correction=CandidateSelector(6, 5), convolution=LocalConvolution(2, 4))),
    "speculators": (dict(speculators_model_type="xpress", transformer_layer_config=LAYERS, block_size=4,
                         mask_token_id=23, aux_hidden_state_layer_ids=[2, 5], xpress_rank=6, xpress_mlp_ratio=3),
                    block(correction=Refiner(6, 3), window_from="newest")),
}


def exported(head, weights):
    """The tensors of a file."""
    flat = flatten(weights)
    return {source.tensors[0]: np.asarray(source.turned(flat[path])) for path, source in sources(head).items()}


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_with_its_settings(name, tmp_path):
    config, head = LAYOUTS[name]
    weights = head.init_params(jax.random.key(0))
    tensors = exported(head, weights)
    if name == "dflash2":           # the authors' names have no container
        tensors = {key.removeprefix("candidate_selector."): x for key, x in tensors.items()}
    if name == "specforge-dspark":          # older files have one
        tensors = {f"logit_head.{key}" if "_head." in key else key: x for key, x in tensors.items()}
    write_files(tmp_path, tensors, config, "pt")
    got, read_weights, ids = read(tmp_path)
    context = dataclasses.replace(got.config, context=head.config.context)
    assert dataclasses.replace(got, config=context) == head
    assert ids is None
    jax.tree.map(np.testing.assert_array_equal, read_weights, weights)
    made = load_drafter(tmp_path)
    assert made.head == got and made.system == ("dflash" if "dflash" in name and name != "dflash2" else made.system)
    save_drafter(tmp_path / "own", made, "float32")
    again = load_drafter(tmp_path / "own")
    assert again.head == got and again.system == made.system
    jax.tree.map(np.testing.assert_array_equal, again.params, weights)


REFUSED = {
    "mask=": (Z_LAB | dict(dflash_config=dict(target_layer_ids=[1, 4])), {}, "does not say which token is the mask"),
    "layers=": (BODY | dict(num_target_layers=None, dflash_config=dict(mask_token_id=23)), {},
                "names neither target_layer_ids nor num_target_layers"),
    "last layer": (Z_LAB | dict(dflash_config=OWN | dict(target_layer_ids=[1, 7])), {},
                   "reads the output of the last layer, 7, and does not say whether before or after the final norm"),
    "range": (Z_LAB | dict(dflash_config=OWN | dict(target_layer_ids=[1, 8])), {}, r"takes indices of the target's 8"),
    "embeddings": (Z_LAB | dict(dflash_config=dict(mask_token_id=23), aux_hidden_state_layer_ids=[0, 4]), {},
                   r"reads the outputs of layers \[-1, 3\]"),
    "both": (Z_LAB | dict(aux_hidden_state_layer_ids=[1, 4]), {}, "which differ"),
    "sliding": (Z_LAB | dict(layer_types=["sliding_attention", "full_attention"], sliding_window=3,
                             use_sliding_window=True), {}, "does not say whether they see a block in order"),
    "no window": (Z_LAB | dict(layer_types=["sliding_attention", "full_attention"]), {}, "sliding_window is missing"),
    "block": (Z_LAB | dict(block_size=None), {}, "lacks block_size"),
    "three layers": (Z_LAB | dict(dflash_config=OWN | dict(target_layer_ids=[1, 2, 4])), {},
                     "takes a multiple of the number of layers, 3"),
    "missing": (Z_LAB, {"norm.weight": None}, "lacks tensor norm.weight"),
    "further": (Z_LAB, {"layers.0.self_attn.g_proj.weight": np.zeros(3)}, "which the network does not have"),
    "shape": (Z_LAB, {"norm.weight": np.zeros(3)}, r"has shape \[3\], takes \[16\]"),
    "other": (BODY | dict(dflash_config=OWN | dict(projector_type="domino")), {}, "holds the tensors of 'dflash'"),
    "unknown": (BODY | dict(dflash_config=OWN | dict(projector_type="lattice")), {}, "says that it is 'lattice'"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_leaves_something_open_is_refused(name, tmp_path):
    config, changed, message = REFUSED[name]
    tensors = exported(block(), block().init_params(jax.random.key(0)))
    tensors = {key: x for key, x in {**tensors, **changed}.items() if x is not None}
    with pytest.raises(CheckpointError, match=message):
        read(tensors, {key: x for key, x in config.items() if x is not None})
    answers = {"mask=": dict(mask=23), "layers=": dict(layers=[1, 4]), "sliding": dict(causal_sliding=True)}
    if name in answers:
        assert read(tensors, config, **answers[name])[0].mask == 23
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({key: np.asarray(x, np.float32) for key, x in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path)
        assert load_drafter(tmp_path, **answers[name]).head.mask == 23


@pytest.mark.parametrize(("map_", "message"), [
    (dict(d2t=[0, 1, 2]), "lacks tensor t2d"), (dict(t2d=[1, 0, 1, 0, 1]), "lacks tensor d2t"),
    (dict(d2t=[0, 2, 4], t2d=[1, 0, 1, 0, 1]), "d2t and t2d name other tokens")])
def test_a_vocabulary_that_is_not_known_is_refused(map_, message):
    """Absolute numbers in `d2t` are refused, too."""
    assert Tensors(dict(d2t=[0, 1, 2], t2d=[1, 0, 1, 0, 1]), {}).vocabulary(3, 5).tolist() == [0, 2, 4]
    assert Tensors(dict(d2t=[0, 0, 0], t2d=[1, 1, 1]), {}).vocabulary(3, 3) is None
    with pytest.raises(CheckpointError, match=message):
        Tensors(map_, {}).vocabulary(3, 5)


def test_tables_of_the_target_are_not_kept_twice():
    head = block(own_head=True, own_table=True)
    weights = head.init_params(jax.random.key(0))
    own, kept = shared_tables(head, weights, weights["embed"], weights["lm_head"]["kernel"])
    assert not own.own_head and not own.own_table and set(weights) - set(kept) == {"embed", "lm_head"}
    own, kept = shared_tables(head, weights, 2 * weights["embed"], weights["lm_head"]["kernel"] + 1)
    assert own == head and set(kept) == set(weights)
