"""Layers for multi-token prediction inside checkpoints draft as those of transformers, and change no output."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import algorithms
from decodax.core import drivers
from decodax.core.types import Params
from decodax.core.window import causal
from decodax.io.drafters import load_drafter, save_drafter
from decodax.io.files import CheckpointError
from decodax.models.names import flatten
from decodax.sampling import build as policy
from tests.drafters.drafting import drafted_logits
from tests.drafters.inside.checkpoints import LAYOUTS, PROMPTS, Case, released_layer_tables
from tests.io.gguf.converting import converted, written
from tests.io.gguf.converting_new import NEW
from tests.io.gguf.converting_next import WITH_NEXT, with_next
from tests.io.quantised.test_quantised_checkpoints import assert_same_weights
from tests.io.quantised.test_quantised_families import LEFT
from tests.io.quantised.writer import KINDS, Tensors, write_safetensors
from tests.matrix import often


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Returns the case of a name."""
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


def first_drafts(case, drafter, ids):
    """The logits after each pair of a text, from the hidden states of transformers."""
    head, window = drafter.head, causal(jnp.asarray([ids[1:]], jnp.int32), jnp.zeros(1, jnp.int32))
    table, last = (jnp.asarray(part.weight.detach().numpy()) for part in (
        case.target.get_input_embeddings(), case.target.get_output_embeddings()))
    cache, project = head.init_cache(1, 0, "float32"), lambda x: x @ last.T

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(weights, features):
        attend = lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, window, **options)
        state = head.follow(head.enter(weights, features), jnp.zeros((1, head.state_width)))
        step = head.step(weights, window.tokens, table.__getitem__, state, window.positions, 0, attend)
        return head.logits(weights, step.hidden, 0, project)

    return run(drafter.params, jnp.asarray(case.features(ids)[:, :-1].numpy()))


ONE = [name for name in LAYOUTS if "two" not in name]


@pytest.mark.wide(but=("glm4-moe", "qwen3.5"))
@pytest.mark.parametrize("name", often(["glm4-moe", "deepseek-v3", "deepseek-v4", "qwen3.5", "mimo"], ONE))
def test_first_drafts_are_those_of_transformers(case, name):
    own, ids = case(name), PROMPTS[0]
    drafter = load_drafter(own.path)
    assert drafter.system == "mtp" and not drafter.head.own_head and not drafter.head.own_table
    wanted = own.logits(own.run(0, own.features(ids)[:, :-1], ids[1:]))
    np.testing.assert_allclose(first_drafts(own, drafter, ids), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["glm4-moe-two", "qwen3.5-moe"], LAYOUTS))
def test_later_drafts_are_those_of_transformers(case, name):
    check_later_drafts(case(name))


def check_later_drafts(own):
    """Prompts are read in chunks, whose borders lie within a text."""
    lm, drafter = own.loaded
    alg = algorithms.make("mtp", lm, drafter)
    bare, rows = alg.bare(), [row for row in PROMPTS if len(row) > 1]
    tokens, size = np.zeros((len(rows), 32), np.int32), np.array(list(map(len, rows)), np.int32)
    for row, given in zip(tokens, rows, strict=True):
        row[:len(given)] = given
    each, chain = (lambda x: np.full(len(rows), x)), policy(len(rows), vocab_size=97)
    params = Params(lm.params, alg.weights)
    s = drivers.begin(bare, lm.model, params, chain, jnp.asarray(tokens), size, size=32, max_new=each(8),
                      min_new=each(0), seed=each(0).astype(np.uint32))
    s = drivers.prefill(bare, lm.model, params, s, width=4)
    following = np.array([[3, 17, 40], [60, 2, 8]])
    found = jax.jit(functools.partial(drafted_logits, bare.draft))(params, s, jnp.asarray(following, jnp.int32))[0]
    for row, ids in enumerate(rows):
        np.testing.assert_allclose(found[row], own.drafts(ids, following[row].tolist()), atol=2e-4, rtol=1e-4)


@pytest.mark.wide(but=("mimo-chain",))
@pytest.mark.parametrize(("name", "shape"), often([("mimo", "chain"), ("deepseek-v3-two", "tree")],
                                                  itertools.product(LAYOUTS, ("chain", "tree"))))
def test_the_output_is_plain_decodings(case, name, shape):
    """Greedy and sampled rows in one ragged batch."""
    lm, drafter = case(name).loaded
    run = lambda **options: dx.generate(lm, PROMPTS, max_new_tokens=8, eos_token_id=[], seed=3, **options,
                                        temperature=[0.0, 0.8, 1.2])
    tree = dict(shape=dx.trees.Fixed.balanced(2, 2)) if shape == "tree" else dict(length=3)
    found = run(algorithm=algorithms.make("mtp", lm, drafter, **tree))
    np.testing.assert_array_equal(found.tokens, run().tokens)


@pytest.fixture
def glm(tmp_path):
    return Case("glm4-moe", tmp_path / "target")


@pytest.mark.wide
def test_tables_of_its_own_are_read_and_a_saved_one_is_loaded_again(glm, tmp_path):
    other = glm.tensors["lm_head.weight"] + 1
    glm.write({**glm.tensors, "model.layers.2.shared_head.head.weight": other})
    made = load_drafter(glm.path)
    assert made.head.own_head and not made.head.own_table
    np.testing.assert_array_equal(made.params["lm_head"]["kernel"], other.T)
    save_drafter(tmp_path, made, dtype="float32")
    back = load_drafter(tmp_path)
    assert back.head == made.head and back.system == "mtp"
    jax.tree.map(np.testing.assert_array_equal, back.params, made.params)


@pytest.mark.wide
def test_several_layers_with_tables_of_their_own_draft_by_them(tmp_path):
    own = Case("glm4-moe-two", tmp_path)
    own.tables = released_layer_tables(own.tensors, 2)
    own.write({**own.tensors, **own.tables})
    assert own.loaded[1].head.layer.own_table and own.loaded[1].head.own_head
    check_later_drafts(own)


@pytest.mark.wide(but=("glm4-moe",))
@pytest.mark.parametrize("name", WITH_NEXT)
def test_the_layer_in_a_gguf_file_is_that_of_the_checkpoint(case, name, tmp_path):
    kind = WITH_NEXT[name]
    own = Case(name, tmp_path, **kind.more) if kind.more else case(name)
    file = converted(own.path, kind, own.entries.get("text_config", own.entries))
    lm, wanted = dx.load(file), own.loaded[1]
    found = algorithms.make("mtp", lm).draft
    assert found.head == wanted.head == load_drafter(file, lm).head
    for path, leaf in flatten(wanted.params).items():
        np.testing.assert_allclose(flatten(found.weights.head)[path], leaf, atol=1e-6, err_msg=path)
    run = lambda **options: dx.generate(lm, PROMPTS, max_new_tokens=6, eos_token_id=[], **options).tokens
    np.testing.assert_array_equal(run(algorithm="mtp"), run())


@pytest.mark.wide
def test_a_layer_of_several_streams_in_a_gguf_file_is_refused(tmp_path):
    kind = NEW["deepseek-v4"]
    more = lambda name, x: {"blk.4.nextn.eh_proj.weight": x} if name.endswith("head.weight") else {}
    file = written(dataclasses.replace(kind, metadata=with_next(kind.metadata), change=lambda name, x, c: {
        **kind.change(name, x, c), **more(name, x)}), tmp_path)[1]
    with pytest.raises(CheckpointError, match="layers that predict further tokens, and those of 'deepseek4' are not"):
        load_drafter(file)


@pytest.mark.wide
def test_a_target_without_a_layer_of_the_further_ones_kind_is_named(tmp_path):
    own = Case("step3p7", tmp_path)
    own.write(text_config={**own.entries["text_config"], "layer_types": ["full_attention"] * 2, "per_layer_config": {}})
    with pytest.raises(CheckpointError, match=f"{tmp_path}: layer_types: got no layer with a sliding window"):
        load_drafter(tmp_path)


def test_without_a_drafter_the_layers_of_the_targets_own_directory_draft(case):
    lm, drafter = case("glm4-moe").loaded
    made = algorithms.make("mtp", lm)
    assert made.draft.head == drafter.head
    jax.tree.map(np.testing.assert_array_equal, made.draft.weights.head, drafter.params)
    with pytest.raises(ValueError, match="'mtp' needs a drafter that was trained for 'none', and none is shipped"):
        algorithms.make("mtp", dataclasses.replace(lm, directory=None, name="none"))


@pytest.mark.wide
def test_a_quantised_layer_stays_packed(glm, tmp_path):
    config, writer = KINDS["fp8"]
    made, plain = Tensors(), dict(glm.tensors)
    for name, x in glm.tensors.items():
        if x.ndim == 2 and ".layers." in name and not LEFT.search(name) and "shared_head" not in name:
            parts, plain[name] = writer(name.removesuffix(".weight"), x)
            made |= parts
        else:
            made[name] = x
    write_safetensors(tmp_path / "model.safetensors", made)
    (tmp_path / "config.json").write_text(json.dumps({**glm.entries, "quantization_config": config}))
    glm.write(plain)
    drafter, dequantised = load_drafter(tmp_path), load_drafter(glm.path)
    assert_same_weights(drafter.params, dequantised.params)
    quantised, wanted = (first_drafts(glm, own, PROMPTS[0]) for own in (drafter, dequantised))
    np.testing.assert_allclose(quantised, wanted, atol=1e-4)


def test_the_layer_of_a_multimodal_model_is_read(case, tmp_path):
    own = case("qwen3.5")
    wanted, inside = load_drafter(own.path), Case("qwen3.5", tmp_path)
    inside.write({re.sub(r"^model\.", "model.language_model.", name): x for name, x in own.tensors.items()},
                 model_type="qwen3_5", text_config=own.entries)
    found = load_drafter(tmp_path)
    assert found.head == wanted.head
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


def test_what_cannot_be_read_is_named(glm):
    whole = glm.tensors
    some = lambda part: {name: x for name, x in whole.items() if part not in name}
    for tensors, entries, message in (
            (some("layers.2.hnorm"), {}, r"lacks tensor model\.layers\.2\.hnorm\.weight"),
            ({**whole, "model.layers.2.more.weight": np.zeros(3, np.float32)}, {}, r"model\.layers\.2\.more\.weight"),
            ({**whole, "model.layers.3.enorm.weight": np.zeros(32, np.float32)}, {"num_nextn_predict_layers": 2},
             r"lacks tensors model\.layers\.3\."),
            (some("layers.2."), {}, "holds a model and no layers that predict further tokens"),
            (whole, {"model_type": "llama"}, "those of model_type 'llama' are not read")):
        glm.write(tensors, **entries)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(glm.path)
