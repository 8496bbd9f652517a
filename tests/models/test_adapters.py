"""Adapters: rows with adapters of their own are rows of merged models, files are those of peft, errors say why."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import decodax as dx
from tests.matrix import often
from tests.models.tiny import COMMON, saved

PROMPTS = [[5, 9, 11, 4], [7, 7], [30, 2, 8]]
ROWS = ["a1", None, "a0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    saved("llama", directory)
    return directory


def some(lm: dx.LM, seed: int, rank: int, targets: tuple[str, ...]) -> dict:
    made = dx.adapters.init(lm.params, jax.random.key(seed), rank, targets)
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(seed + 9), x.shape), made)


@pytest.fixture(scope="module")
def several(home) -> tuple[dx.LM, dict]:
    lm = dx.load(home)
    return lm, {"a0": some(lm, 0, 2, ("q", "v", "o")), "a1": some(lm, 1, 3, ("q", "down"))}


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", often(["prompt-lookup:length=3"], [
    None, "prompt-lookup:length=3", "token-recycling", "beam-search:width=2"]))
@pytest.mark.parametrize("cache", often([None], [None, "paged", "kivi"]))
def test_rows_equal_those_of_merged_models(several, algorithm, cache):
    lm, adapters = several
    sampling = {} if algorithm is not None and "beam" in algorithm else dict(temperature=0.9)
    run = lambda lm, prompts, **more: dx.generate(lm, prompts, max_new_tokens=12, algorithm=algorithm, cache=cache,
                                                  eos_token_id=[], **sampling, **more)
    together = run(lm.with_adapters(adapters), PROMPTS, adapter=ROWS)
    alone = [run(lm if name is None else lm.with_adapter(adapters[name]), prompt, request_ids=[i])
             for i, (prompt, name) in enumerate(zip(PROMPTS, ROWS, strict=True))]
    assert [together.row(i).tolist() for i in range(3)] == [one.row(0).tolist() for one in alone]
    free = run(lm, PROMPTS)
    assert [together.row(i).tolist() == free.row(i).tolist() for i in range(3)] == [False, True, False]


@pytest.mark.wide
def test_rows_in_slots_keep_their_adapters(several):
    lm, adapters = several
    lm = lm.with_adapters(adapters)
    whole = dx.generate(lm, PROMPTS, max_new_tokens=8, adapter=ROWS)
    slots = dx.generate(lm, PROMPTS, max_new_tokens=8, adapter=ROWS, batch_size=2)
    assert whole.tokens.tolist() == slots.tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize("weights", often(["int8"], ["int8", "int4", "bfloat16"]))
def test_beside_packed_weights(home, weights):
    lm = dx.load(home, weights=weights)
    adapter = some(lm, 0, 2, ("q", "down"))
    alone = lm.with_adapter(adapter, merge=False)
    rows = lm.with_adapters({"a": adapter})
    assert dx.generate(alone, PROMPTS, max_new_tokens=8).tokens.tolist() == \
        dx.generate(rows, PROMPTS, max_new_tokens=8, adapter="a").tokens.tolist()
    with pytest.raises(ValueError, match="cannot be merged into packed weights"):
        lm.with_adapter(adapter)


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["llama"], ["llama", "gpt2"]))
@pytest.mark.parametrize("rslora", [False, True])
def test_files_of_peft(tmp_path, family, rslora):
    """`W + B @ A * scale`, as transformers' model with those weights; the same files, read by peft 0.21.2, agreed to
    2e-7, and so did what `save` writes."""
    torch.manual_seed(0)
    if family == "llama":
        base, modules = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)), {
            "self_attn.q_proj": (4, 12.0), "self_attn.o_proj": (6, 5.0), "mlp.down_proj": (4, 12.0)}
        stem, layers, patterns = "model.layers", base.model.layers, ({"o_proj": 6}, {"o_proj": 5})
    else:
        base, modules = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)), {
            "mlp.c_fc": (4, 12.0)}
        stem, layers, patterns = "transformer.h", base.transformer.h, ({}, {})
    base.save_pretrained(tmp_path / "base")
    tensors = {}
    for i, layer in enumerate(layers):
        for module, (rank, alpha) in modules.items():
            linear = layer.get_submodule(module)
            inputs, outputs = linear.weight.shape[::-1] if family == "llama" else linear.weight.shape
            a, b = torch.randn(rank, inputs) * 0.2, torch.randn(outputs, rank) * 0.2
            more = b @ a * (alpha / (rank ** 0.5 if rslora else rank))
            linear.weight.data += more if family == "llama" else more.T
            name = f"base_model.model.{stem}.{i}.{module}"
            tensors |= {f"{name}.lora_A.weight": a.numpy(), f"{name}.lora_B.weight": b.numpy()}
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 4, "lora_alpha": 12, "use_rslora": rslora, "rank_pattern": patterns[0],
        "alpha_pattern": patterns[1], "modules_to_save": None, "base_model_name_or_path": "some/base"}))
    ids = np.random.default_rng(0).integers(3, 90, (2, 9))
    with torch.no_grad():
        wanted = base.eval()(torch.tensor(ids)).logits.numpy()
    lm = dx.load(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(lm.model.forward(lm.params, jnp.asarray(ids)), wanted, atol=2e-5)
    # and back
    read = dx.adapters.read(tmp_path / "adapter", lm.model, family)
    dx.adapters.save(tmp_path / "own", read, lm.model, family)
    again = dx.adapters.read(tmp_path / "own", lm.model, family)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), read, again)
    assert load_file(tmp_path / "own/adapter_model.safetensors").keys() == tensors.keys()
    with pytest.raises(ValueError, match=r"some/base\. Load it onto that"):
        dx.load(tmp_path / "adapter")


@pytest.mark.wide
def test_gradients_go_to_the_adapter(several):
    lm, _ = several
    adapter, tokens = dx.adapters.init(lm.params, jax.random.key(0), 2), jnp.array([[4, 5, 6]])
    loss = lambda adapter: lm.model.forward(dx.adapters.apply(lm.params, adapter), tokens)[0, -1, 3]
    found = jax.grad(loss)(adapter)
    assert jax.tree.structure(found) == jax.tree.structure(adapter)
    norms = [float(jnp.abs(x["kernel"]["b"]).max()) for x in found["layers"]["0"]["attn"].values()]
    assert min(norms) > 0
    np.testing.assert_array_equal(lm.model.forward(dx.adapters.apply(lm.params, adapter), tokens),
                                  lm.model.forward(lm.params, tokens))


def test_a_model_that_does_not_fit_says_so(several, tmp_path, home):
    lm, adapters = several
    rows = lm.with_adapters(adapters)
    for run, message in (
            (lambda: dx.generate(rows, PROMPTS, adapter="b"), "adapter: got 'b', takes a0, a1"),
            (lambda: dx.generate(rows, PROMPTS, adapter=["a0"]), "for 3 prompts"),
            (lambda: dx.generate(lm, PROMPTS, adapter="a0"), "has none; takes None, or a model that lm.with_adapters"),
            (lambda: dx.adapters.init(lm.params, jax.random.key(0), targets=("x",)), "targets: got 'x'"),
            (lambda: lm.with_adapter({"layers": {"9": {"attn": {"q": adapters["a0"]["layers"]["0"]["attn"]["q"]}}}}),
             "layers.9.attn.q.kernel"),
            (lambda: lm.with_adapter(tmp_path), "adapter_config.json"),
            (lambda: dx.generate(rows, PROMPTS, adapter="a0", context=[1]), "context"),
            (lambda: lm.with_params({**lm.params, "embed": lm.params["embed"][:5]}), r"params\['embed'\]: got shape")):
        with pytest.raises(ValueError, match=message):
            run()


Q = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]


def written(directory: Path, entries: dict, ranks: tuple[int, int] = (2, 4), stem: str = "base_model.model.",
            modules: list[str] = Q) -> Path:
    """An adapter of the queries of both layers, whose products are `[1, 1, ...]` times the rank before scaling."""
    directory.mkdir(exist_ok=True)
    tensors = {}
    for module, rank in zip(modules, ranks, strict=True):
        tensors[f"{stem}{module}.lora_A.weight"] = np.ones((rank, 32), np.float32)
        tensors[f"{stem}{module}.lora_B.weight"] = np.ones((32, rank), np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}
    (directory / "adapter_config.json").write_text(json.dumps({**plain, **entries}))
    return directory


def scales(lm: dx.LM, directory: Path) -> list[float]:
    layers = dx.adapters.read(directory, lm.model)["layers"]
    return [float(layers[str(i)]["attn"]["q"]["kernel"]["b"][0, 0]) for i in range(2)]


DEEP = {"rank_pattern": {"layers.1.self_attn.q_proj": 4}}


@pytest.mark.parametrize(("entries", "wanted"), [
    ({"rank_pattern": {Q[1]: 4}}, (4, 2)),
    ({"rank_pattern": {f"^{Q[1]}": 4}}, (4, 2)),
    ({"rank_pattern": {r".*\.layers\.1\..*(q_proj|v_proj)$": 4}}, (4, 2)),
    ({"rank_pattern": {"v_proj|layers.1.self_attn.q_proj": 4}}, (4, 2)),
    ({**DEEP, "alpha_pattern": {"q_proj": 6}}, (3, 1.5)),
    ({**DEEP, "alpha_pattern": {r"model\.layers\.[1-9]\..*": 2, "q_proj": 6}}, (3, 0.5)),
    ({**DEEP, "alpha_pattern": {"q_proj": 6, r"model\.layers\.[1-9]\..*": 2}}, (3, 1.5)),     # the first that matches
    ({**DEEP, "alpha_pattern": {"self_attn": 6, "_proj": 6}}, (4, 2)),                 # no whole part of the name
    ({**DEEP, "alpha_pattern": {"^layers.1.self_attn.q_proj": 6}}, (4, 2)),
    ({**DEEP, "use_rslora": True}, (8 / 2 ** 0.5, 4)),
    ({**DEEP, "lora_alpha": 3}, (1.5, 0.75))], ids=str)
def test_patterns_of_peft(home, tmp_path, recwarn, entries, wanted):
    """What peft's rule gives, worked out by hand: keys match from a dot on to the end of the whole name."""
    lm = dx.load(home)
    np.testing.assert_allclose(scales(lm, written(tmp_path / "a", entries)), wanted, rtol=1e-6)


def test_a_key_of_no_module_is_warned_of(home, tmp_path):
    with pytest.warns(UserWarning, match="alpha_pattern: mlp.up_proj: matches no module"):
        assert scales(dx.load(home), written(tmp_path / "a", {**DEEP, "alpha_pattern": {"mlp.up_proj": 1}})) == [4, 2]


REFUSED = [
    {"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "olora"},
    {"init_lora_weights": "corda"}, {"init_lora_weights": "loftq"}, {"init_lora_weights": "lora_ga"},
    {"alora_invocation_tokens": [3]}, {"kasa_config": {}}, {"monteclora_config": {}}, {"use_dora": True},
    {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"layer_replication": [[0, 2]]},
    {"trainable_token_indices": [1]}, {"target_parameters": ["experts.up"]}, {"use_qalora": True},
    {"arrow_config": {"top_k": 2}}, {"velora_config": {"num_groups": 2}}, {"megatron_config": {"a": 1}},
    {"use_bdlora": {"nblocks": 2}}, {"something_new": "yes"}, {"rank_pattern": {"(": 4}}, {"alpha_pattern": [1]},
    {"r": 0}, {"lora_alpha": None}, {"peft_type": "LOHA"}, {"layers_to_transform": "all"}, {"target_modules": 3}]


@pytest.mark.parametrize("entry", REFUSED, ids=str)
def test_entries_that_change_an_adapter_are_refused(home, tmp_path, entry):
    with pytest.raises(ValueError, match=f"adapter_config.json: {next(iter(entry))}: got"):
        dx.load(home, adapter=written(tmp_path / "a", {**DEEP, **entry}))


def test_entries_that_ask_for_nothing_are_taken(home, tmp_path):
    """All entries that peft 0.18 writes for a plain adapter, and the neutral values of entries that nobody knows."""
    none = dict.fromkeys(("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "exclude_modules",
                          "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform",
                          "megatron_config", "modules_to_save", "revision", "target_parameters",
                          "trainable_token_indices", "velora_config", "something_new"))
    entries = {**none, **DEEP, "auto_mapping": {"base_model_class": "LlamaForCausalLM"}, "bias": "none",
               "base_model_name_or_path": "some/base", "ensure_weight_tying": False, "fan_in_fan_out": False,
               "inference_mode": True, "init_lora_weights": "gaussian", "loftq_config": {}, "lora_bias": False,
               "lora_dropout": 0.1, "megatron_core": "megatron.core", "peft_version": "0.18.0", "qalora_group_size": 16,
               "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "use_dora": False, "use_qalora": False,
               "use_rslora": False, "enable_lora": None, "use_bdlora": {}, "another_new": []}
    assert scales(dx.load(home), written(tmp_path / "a", entries)) == [4, 2]


@pytest.mark.parametrize(("entries", "said"), [
    ({"r": 3}, "layers.0.self_attn.q_proj.lora_A.weight has rank 2"),
    ({}, "layers.1.self_attn.q_proj.lora_A.weight has rank 4"),
    ({"rank_pattern": {"q_proj": 4}}, "layers.0.self_attn.q_proj.lora_A.weight has rank 2"),
    ({**DEEP, "target_modules": ["k_proj"]}, "layers.0.self_attn.q_proj.lora_A.weight adapts a module"),
    ({**DEEP, "target_modules": r".*\.0\..*q_proj"}, "layers.1.self_attn.q_proj.lora_A.weight adapts a module"),
    ({**DEEP, "target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}, "layers.1.self"),
    ({**DEEP, "target_modules": ["q_proj"], "layers_to_transform": [0]}, "layers.1.self_attn.q_proj.lora_A.weight"),
    ({**DEEP, "target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}, "layers.0.self")])
def test_tensors_that_contradict_the_entries_are_named(home, tmp_path, entries, said):
    with pytest.raises(ValueError, match=said):
        dx.load(home, adapter=written(tmp_path / "a", entries))


@pytest.mark.parametrize("entries", [
    {"target_modules": "all-linear"}, {"target_modules": r".*\.\d\..*q_proj"}, {"target_modules": Q},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1, 0], "exclude_modules": ["k_proj"]}], ids=str)
def test_entries_that_choose_the_modules_of_the_tensors(home, tmp_path, entries):
    assert scales(dx.load(home), written(tmp_path / "a", {**DEEP, **entries})) == [4, 2]


def test_tensors_of_wrapped_models(home, tmp_path):
    lm = dx.load(home)
    assert scales(lm, written(tmp_path / "a", DEEP, stem="base_model.model._orig_mod.")) == [4, 2]
    assert scales(lm, written(tmp_path / "b", DEEP, stem="base_model.model.language_model.")) == [4, 2]
    for i, (modules, said) in enumerate(((["model.visual.layers.0.self_attn.q_proj", Q[1]], "of the language model"),
                                         ([Q[1], f"other.{Q[1]}"], "adapts already"))):
        with pytest.raises(ValueError, match=said):
            scales(lm, written(tmp_path / f"c{i}", DEEP, (4, 4), modules=modules))
