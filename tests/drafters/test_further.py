"""Layers for multi-token prediction inside checkpoints draft as those of transformers, and change no output."""

import copy
import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.modeling_layers import MtpModel

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
from tests.io.gguf.converting import converted
from tests.io.gguf.converting_next import WITH_NEXT
from tests.io.quantised.test_quantised_checkpoints import assert_same_weights
from tests.io.quantised.test_quantised_families import LEFT
from tests.io.quantised.writer import KINDS, Tensors, write_safetensors
from tests.matrix import often
from tests.models import tiny
from tests.models.families.further_layers import ALONE

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
PARTS = "enorm", "hnorm", "eh_proj", "post_norm", "mtp_block"
DEEPSEEK = dict(zip(PARTS, [f"model.layers.2{part}" for part in (
    ".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")], strict=True))
QWEN = dict(zip(PARTS, ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"],
                strict=True))
MIMO = dict(zip(PARTS, [f"model.mtp_layers.0{part}" for part in (
    ".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")], strict=True))

MIMO_V2 = dict(zip(PARTS, [f"model.mtp.layers.0{part}" for part in (
    ".enorm", ".hnorm", ".eh_proj", ".final_layernorm", "")], strict=True))
ERNIE = dict(zip(PARTS, [f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj", "", "block")],
                 strict=True))
HY3 = {**DEEPSEEK, "post_norm": "model.layers.2.final_layernorm"}
NEMOTRON = {**{part: f"mtp.layers.0.{part}" for part in PARTS[:3]}, "post_norm": "mtp.layers.1.final_layernorm",
            "attention": "mtp.layers.0", "moe": "mtp.layers.1"}
LONGCAT = {**{part: f"model.mtp.layers.0.{part}" for part in (
    "eh_proj", "self_attn", "input_layernorm", "post_attention_layernorm")}, "enorm": "model.mtp.layers.0.enorm.m",
           "hnorm": "model.mtp.layers.0.hnorm.m", "post_norm": "model.mtp.norm",
           "mlp": "model.mtp.layers.0.transformer_layer.mlp"}
STEP = {**DEEPSEEK, "post_norm": "model.layers.2.transformer.shared_head.norm"}
SLIDES = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "swiglu_limits": [0, 0.2],
          "mlp_layer_types": ["sparse"] * 2, "mtp_layer_types": ["sliding_attention"] * 2,
          "mtp_mlp_layer_types": ["dense"] * 2, "mtp_per_layer_config": {0: {"num_attention_heads": 6}}}
ZEROS = "mimo", "ernie4.5", "ernie4.5-moe", "hy3"
"""Layouts whose layers read zeros in place of the first embedding."""
BEFORE = "mimo", "mimo-v2-flash", "step3p7", "step3p7-two"
"""Layouts whose layers read the target's hidden states before its final norm."""

# name: case of tests/models/tiny.py, further options, the released name of each part, and model_type if it is another
LAYOUTS = {
    "glm4-moe": ("glm4-moe", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "glm4-moe-two": ("glm4-moe", {"num_hidden_layers": 2, "num_mtp_layers": 2}, DEEPSEEK, None),
    "deepseek-v3": ("deepseek-v3", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "deepseek-v3-two": ("deepseek-v3", {"num_hidden_layers": 2, "num_mtp_layers": 2}, DEEPSEEK, None),
    "deepseek-v32": ("deepseek-v32", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "glm4-moe-lite": ("glm4-moe-lite", {"num_hidden_layers": 2}, DEEPSEEK, None),
    "qwen3-next": ("qwen3-next", {**LAYERS, "mlp_only_layers": []}, QWEN, None),
    "qwen3.5": ("qwen3.5", LAYERS, QWEN, None),
    "qwen3.5-moe": ("qwen3.5-moe", LAYERS, QWEN, None),
    "mimo-v2-flash": ("mimo-v2-flash", {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]},
                      MIMO_V2, None),
    "ernie4.5": ("ernie4.5", {"tie_word_embeddings": False}, ERNIE, None),
    "ernie4.5-moe": ("ernie4.5-moe", {"tie_word_embeddings": False}, ERNIE, None),
    "longcat-flash": ("longcat-flash", {}, LONGCAT, None),
    "step3p7": ("step3p7", {**SLIDES, "swiglu_limits_shared": [0, 0.2]}, STEP, None),
    "step3p7-two": ("step3p7", {**SLIDES, "swiglu_limits_shared": None, "num_mtp_layers": 2, "mtp_per_layer_config": {
        i: {"num_attention_heads": 6} for i in range(2)}}, STEP, None),
    "hy3": ("hy3", {}, HY3, None), "nemotron-h": ("nemotron-h", {}, NEMOTRON, None),
    "mimo": ("qwen2", {"tie_word_embeddings": False, "mtp_hidden_states_first": True}, MIMO, "mimo")}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 9, 31], [9, 10, 11], [1]]


OTHERS = {id(HY3): {
    "mlp.gate.weight": "mlp.router.gate.weight", "mlp.e_score_correction_bias": "mlp.expert_bias",
    **{f"mlp.shared_experts.{part}.weight": f"mlp.shared_mlp.{part}.weight"
       for part in ("gate_proj", "up_proj", "down_proj")}}, id(MIMO_V2): {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight", "self_attn.sinks":
    "self_attn.attention_sink_bias"}}
"""Names in files by those in transformers, by layout."""


def released(state: dict, parts: dict, stacked: bool) -> dict:
    """The tensors of an `MtpModel` under the names of released files, with experts one by one or together."""
    found = {}
    for name, x in state.items():
        if (place := re.fullmatch(r"layers\.(\d)\.(\w+)\.(.+)", name)) is None:
            continue        # the target's
        stem, inner = parts[place[2]].replace("layers.2", f"layers.{2 + int(place[1])}"), place[3]
        inner = OTHERS.get(id(parts), {}).get(inner, inner)
        if (of := inner.partition(".experts.")[0]) != inner and not stacked:
            for e, own in enumerate(x):
                each = zip(("gate_proj", "up_proj"), own.chunk(2), strict=True) if "gate_up" in inner else (
                    (inner.rpartition(".")[2], own),)
                found |= {f"{stem}.{of}.experts.{e}.{part}.weight": y for part, y in each}
        else:
            found[f"{stem}.{inner}"] = x
    return {name: x.detach().numpy().copy() for name, x in found.items()}


def released_layer_tables(tensors, count):
    """Other tables for each layer than the target's."""
    draw = np.random.default_rng(5)
    return {f"model.layers.{2 + i}.{name}.weight": tensors["lm_head.weight"] + draw.normal(
        size=tensors["lm_head.weight"].shape).astype(np.float32) * 0.2
        for i in range(count) for name in ("embed_tokens", "shared_head.head")}


class Case:
    """A checkpoint with a further layer, what it computes in transformers, and what this library loads."""

    def __init__(self, name, directory):
        case, options, self.parts, kind = LAYOUTS[name]
        self.name, self.path, self.tables = name, directory, {}
        self.count = options.get("num_mtp_layers", 1)
        self.target = tiny.build(case, **{
            "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"] * self.count,
            "mtp_mlp_layer_types": ["sparse"] * self.count, **copy.deepcopy(options)})
        if name == "mimo-v2-flash":         # transformers reads no further layers of this family
            self.target.config.num_mtp_layers = 1
        if self.parts is STEP:              # nor the number in this entry
            self.target.config.text_config.num_nextn_predict_layers = self.count
        self.layer = (ALONE[name](self.target) if name in ALONE else MtpModel(self.target, self.count)).eval()
        if self.parts is ERNIE:
            self.layer.layers[0].use_post_norm, self.layer.layers[0].post_norm = False, None
        for layer in self.layer.layers if self.parts is STEP else ():
            layer.use_post_norm = False     # in `logits` alone
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in self.layer.layers.parameters():
                weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.ndim == 1 else 0.0))
            for key, buffer in self.layer.layers.named_buffers():
                if "correction" in key:
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
        self.target.save_pretrained(directory)
        self.tensors, self.entries = load_file(directory / "model.safetensors"), json.loads(
            (directory / "config.json").read_text())
        self.tensors |= released(self.layer.state_dict(), self.parts, name == "qwen3.5-moe")
        if self.parts is DEEPSEEK:      # with the copies that released files have
            for i in range(2, 2 + self.count):
                self.tensors |= {f"model.layers.{i}.embed_tokens.weight": self.tensors["model.embed_tokens.weight"],
                                 f"model.layers.{i}.shared_head.head.weight": self.tensors["lm_head.weight"]}
        self.entries |= {"num_nextn_predict_layers": self.count} | ({} if kind is None else {"model_type": kind})
        self.write()

    def write(self, tensors=None, **entries):
        save_file(self.tensors if tensors is None else tensors, self.path / "model.safetensors")
        (self.path / "config.json").write_text(json.dumps({**self.entries, **entries}))

    @functools.cached_property
    def loaded(self):
        with pytest.warns(UserWarning, match="further tokens, .*the algorithm 'mtp' drafts with them"):
            lm = dx.load(self.path)
        return lm, load_drafter(self.path, lm)

    def features(self, ids):
        """The hidden states of the target that the layer reads."""
        found = []
        decoder = self.target.get_decoder()
        norm = decoder.norm_f if self.name == "nemotron-h" else decoder.norm
        hook = norm.register_forward_hook(lambda part, args, out: found.append(
            args[0] if self.name in BEFORE else out))
        with torch.no_grad():
            self.target(input_ids=torch.tensor([ids]), use_cache=False)
        hook.remove()
        return found[0]

    def run(self, layer, hidden, tokens):
        """The output of a layer for pairs of hidden states and tokens."""
        with torch.no_grad():
            own = self.tables.get(f"model.layers.{2 + layer}.embed_tokens.weight")
            embedded = self.layer.embed_tokens(torch.tensor([tokens])) if own is None else torch.tensor(own[[tokens]])
            if self.name in ZEROS:
                embedded[:, 0] = 0
            where = torch.arange(len(tokens))[None] + layer
            return self.layer.forward_layer(layer, hidden, where, None, inputs_embeds=embedded)

    def logits(self, hidden, layer=0):
        with torch.no_grad():
            if (own := self.tables.get(f"model.layers.{2 + layer}.shared_head.head.weight")) is not None:
                return hidden.numpy() @ own.T
            return self.target.lm_head(self.layer.layers[layer].post_norm(hidden) if self.parts is STEP else hidden
                                       ).numpy()

    def drafts(self, ids, following):
        """The logits after a text and after each of the tokens drafted after it."""
        hidden, tokens, found, last = self.features(ids)[:, :-1], ids[1:], [], self.count - 1
        for i in range(len(following) + 1):
            out = self.run(min(i, last), hidden, tokens)
            found.append(self.logits(out[0, -1], min(i, last)))
            tokens = [*tokens, *following[i:i + 1]]
            hidden, tokens = (out, tokens[1:]) if i < last else (torch.cat([hidden, out[:, -1:]], 1), tokens)
        return np.stack(found)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Returns the case of a name."""
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


def first_drafts(case, drafter, ids):
    """The logits after each pair of a text, from the hidden states of transformers."""
    head, window = drafter.head, causal(jnp.asarray([ids[1:]], jnp.int32), jnp.zeros(1, jnp.int32))
    table, last = (jnp.asarray(case.tensors[name]) for name in (
        "backbone.embeddings.weight" if case.name == "nemotron-h" else "model.embed_tokens.weight", "lm_head.weight"))
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
@pytest.mark.parametrize("name", often(["glm4-moe", "deepseek-v3", "qwen3.5", "mimo"], ONE))
def test_first_drafts_are_those_of_transformers(case, name):
    own, ids = case(name), PROMPTS[0]
    drafter = load_drafter(own.path)
    assert drafter.system == "mtp" and not drafter.head.own_head and not drafter.head.own_table
    wanted = own.logits(own.run(0, own.features(ids)[:, :-1], ids[1:]))
    np.testing.assert_allclose(first_drafts(own, drafter, ids), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["glm4-moe-two"], LAYOUTS))
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
def test_the_layer_in_a_gguf_file_is_that_of_the_checkpoint(case, name):
    own = case(name)
    file = converted(own.path, WITH_NEXT[name], own.entries)
    lm, wanted = dx.load(file), own.loaded[1]
    found = algorithms.make("mtp", lm).draft
    assert found.head == wanted.head == load_drafter(file, lm).head
    for path, leaf in flatten(wanted.params).items():
        np.testing.assert_allclose(flatten(found.weights.head)[path], leaf, atol=1e-6, err_msg=path)
    run = lambda **options: dx.generate(lm, PROMPTS, max_new_tokens=6, eos_token_id=[], **options).tokens
    np.testing.assert_array_equal(run(algorithm="mtp"), run())


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
