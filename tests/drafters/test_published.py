"""Published drafters are read as their producers mean them, and compute what the producers' code computes."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import decodax as dx
from decodax.cli.contenders import parted
from decodax.core.types import ShowsWeights
from decodax.io.drafters import TrainedDrafter, holds_drafter, load_drafter, save_drafter
from decodax.io.files import CheckpointError
from decodax.models.config import NormConfig
from decodax.models.drafters.falcon import FalconHead
from decodax.models.drafters.prompt_tokens import HiddenTransferHead
from decodax.train.drafting.unrolled import unrolled
from tests.drafters import given
from tests.drafters.fresh import fresh
from tests.drafters.test_heads import HEADS, ONE

read = lambda name: json.loads((Path(__file__).parent / name).read_text())
REFERENCE, AUTHORS = read("eagle3.json"), read("authors.json")
CASES = {case["name"]: case for case in REFERENCE["cases"]}


def written(path: Path, config: dict, tensors: dict, name: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / name)
    return path


def eagle3(path: Path, name: str, **changes) -> Path:
    """A directory with the tensors of a case, and its configuration with changes."""
    case = CASES[name]
    tensors = given.tensors(case["shapes"])
    if (few := case["config"]["draft_vocab_size"]) < REFERENCE["vocabulary"]:
        ids = np.arange(few) * 2 + 1
        tensors |= {"d2t": ids - np.arange(few), "t2d": np.isin(np.arange(REFERENCE["vocabulary"]), ids)}
    return written(path, {**case["config"], **changes}, tensors)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_a_head_of_eagle3_computes_what_speculators_does(name, tmp_path):
    drafter = load_drafter(eagle3(tmp_path, name))
    T = REFERENCE["positions"]
    features, ids = given.inputs(T, REFERENCE["features"], REFERENCE["vocabulary"])
    # the reference reads features beside the tokens after them
    tokens = jnp.asarray(np.pad(ids, ((0, 0), (1, 0))))
    found = unrolled(None, drafter.head, drafter.params, None, tokens, jnp.pad(features, ((0, 0), (0, 1), (0, 0))),
                     REFERENCE["steps"])
    for j, wanted in enumerate(CASES[name]["logits"]):
        np.testing.assert_allclose(found[j][0][0, :T - j], wanted, atol=2e-5, rtol=1e-4)
    assert drafter.head.taps == (0, 1, 3) and drafter.system == "eagle-3"
    assert (drafter.ids is None) == (name != "eagle3 of a smaller vocabulary")


@dataclasses.dataclass(frozen=True)
class Table(ShowsWeights):
    """A target of which a head uses the embeddings alone. Its weights are their name."""

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        raise NotImplementedError

    def apply(self, params, window, cache):
        raise NotImplementedError

    def embeddings(self, params, tokens):
        return jnp.asarray(params)[tokens]

    def logits(self, params, hidden):
        return hidden


EMBEDDINGS = {"hydra": "target.embed", "eagle": "embed_tokens.weight"}
"""The reference's name of the embeddings that a head takes from its target."""


@pytest.mark.wide
@pytest.mark.parametrize("case", AUTHORS["cases"], ids=lambda case: case["name"])
def test_a_head_computes_what_its_authors_code_does(case, tmp_path):
    """The logits after each number of drafts; of EAGLE its hidden states, since the head is the target's."""
    system, T, D, V = case["name"].partition(" ")[0], *(AUTHORS[key] for key in ("positions", "features", "vocabulary"))
    tensors = {name: given.tensor(case["same"][name].removeprefix("speculator."), tuple(shape))
               for name, shape in case["shapes"].items()}
    drafter = load_drafter(written(tmp_path, case["config"], tensors, case["file"]))
    assert drafter.system == system
    features, ids = given.inputs(T, D, V)
    found = unrolled(Table(), drafter.head, drafter.params, given.tensor(EMBEDDINGS.get(system, "none"), (V, D)),
                     jnp.asarray(np.pad(ids, ((0, 0), (1, 0)))), jnp.pad(features, ((0, 0), (0, 1), (0, 0))),
                     len(case["logits"]))
    for (logits, hidden), wanted in zip(found, case["logits"], strict=True):
        got = hidden if system == "eagle" else logits
        np.testing.assert_allclose(got[0, :len(wanted)], wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.wide
def test_a_file_that_leaves_something_open_is_refused(tmp_path):
    plain = "eagle3"
    path = eagle3(tmp_path / "a", plain, speculators_model_type=None, architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(CheckpointError, match=re.escape("layers [1, 2, 4], and does not say if these are")):
        load_drafter(path)
    assert load_drafter(path, layer_ids="outputs").head.taps == (1, 2, 4)
    assert load_drafter(path, layer_ids="inputs").head.taps == (0, 1, 3)
    path = eagle3(tmp_path / "b", plain, speculators_model_type=None, norm_output=True,
                  architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(CheckpointError, match="norm_output is true, which producers mean differently"):
        load_drafter(path, layer_ids="inputs")
    assert load_drafter(path, layer_ids="inputs", feeds_back="before norm").head.feeds_back == "before norm"
    path = eagle3(tmp_path / "c", plain, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(CheckpointError, match="names no layers of the target"):
        load_drafter(path)


def test_a_file_with_a_missing_or_a_further_tensor_names_it(tmp_path):
    tensors = given.tensors(CASES["eagle3"]["shapes"])
    fewer = {name: x for name, x in tensors.items() if name != "fc.weight"}
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load_drafter(written(tmp_path / "a", CASES["eagle3"]["config"], fewer))
    more = {**tensors, "layers.0.extra.weight": np.zeros(3, np.float32)}
    with pytest.raises(CheckpointError, match=r"layers\.0\.extra\.weight"):
        load_drafter(written(tmp_path / "b", CASES["eagle3"]["config"], more))


OTHERS = {"hidden-transfer": HiddenTransferHead((0, 1), 16, width=16),
          "falcon": FalconHead((), 16, config=ONE, block=3)}


@pytest.mark.wide
@pytest.mark.parametrize("name", [*HEADS, *OTHERS])
def test_a_saved_drafter_is_loaded_again(name, tmp_path):
    head = (HEADS | OTHERS)[name]
    if name == "mtp":           # with norms of another kind
        config = dataclasses.replace(head.config, norm=NormConfig("layer", bias=True))
        head = dataclasses.replace(head, config=config)
    made = TrainedDrafter("eagle-3", head, head.init_params(jax.random.key(0)), jnp.arange(head.vocab))
    save_drafter(tmp_path, made, dtype="float32")
    back = load_drafter(tmp_path)
    assert back.head == head and back.system == made.system
    jax.tree.map(np.testing.assert_array_equal, back.params, made.params)
    np.testing.assert_array_equal(back.ids, made.ids)


@pytest.mark.wide
def test_a_drafter_of_another_target_or_method_is_refused(tmp_path):
    lm = dx.load("pycode")
    head = HEADS["medusa"]
    made = TrainedDrafter("medusa", head, head.init_params(jax.random.key(0)))
    with pytest.raises(ValueError, match=r"draft: 'drafter' reads hidden states of width 16, and those of 'pycode'"):
        dx.generate(lm, "a", algorithm="medusa", draft=made)
    with pytest.raises(ValueError, match="got one of 'medusa', 'hydra' takes one of 'hydra'"):
        dx.generate(lm, "a", algorithm="hydra", draft=made)
    with pytest.raises(ValueError, match="'hydra' needs a drafter that was trained for 'pycode', and none is shipped"):
        dx.generate(lm, "a", algorithm="hydra")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["eagle-3", "medusa", "mixture-of-attentions", "dflash"])
def test_drafters_may_be_packed_and_the_output_stays_plain_decodings(name, tmp_path):
    lm = dx.load("pycode")
    save_drafter(tmp_path, fresh(name, lm), dtype="float32")
    packed, full = load_drafter(tmp_path, lm, weights="int8"), load_drafter(tmp_path, lm)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert size(packed.params) < 0.4 * size(full.params)
    options = dict(max_new_tokens=8, eos_token_id=[], temperature=1.0, seed=3)
    plain = dx.generate(lm, ["def f(x):", "class A"], **options).tokens.tolist()
    assert dx.generate(lm, ["def f(x):", "class A"], algorithm=name, draft=packed, **options).tokens.tolist() == plain


@pytest.mark.wide
def test_the_shipped_drafter_loses_nothing_in_eight_bits():
    lm, options = dx.load("pycode"), dict(max_new_tokens=64, eos_token_id=[], temperature=0.0)
    drafters = [load_drafter("pycode-eagle-3", lm, weights=weights) for weights in (None, "int8")]
    rounds = [dx.generate(lm, "def read(path):\n", algorithm="eagle-3", draft=one, **options).stats.rounds.sum()
              for one in drafters]
    assert abs(int(rounds[0]) - int(rounds[1])) <= 1


def test_a_format_that_needs_data_is_refused_for_a_drafter():
    with pytest.raises(ValueError, match="weights: 'squeezellm' needs calibration data"):
        load_drafter("pycode-eagle-3", weights="squeezellm")


@pytest.mark.parametrize(("drafts", "config", "tensors"), [
    (True, {"medusa_num_heads": 3}, ()), (True, {"hydra_num_heads": 3}, ()),
    (True, {"model_type": "mlp_speculator"}, ()), (True, {"speculators_model_type": "eagle3"}, ()),
    (True, {"architectures": ["LlamaForCausalLMEagle3"]}, ()), (True, {"dflash_config": {}}, ()),
    (True, {"model_type": "gemma4_assistant"}, ()),
    (True, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, ("fc.weight",)),
    (False, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, ("lm_head.weight",)),
    (False, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}, ("model.norm.weight",)),
    (True, {"medusa_num_heads": 3}, ("medusa_head.0.0.linear.weight",)),
    (False, {"medusa_num_heads": 3}, ("model.embed_tokens.weight", "medusa_head.0.0.linear.weight")),
    (False, {"architectures": ["LlamaForCausalLM"], "pard_token": 3}, ())])
def test_drafters_are_told_from_models(drafts, config, tensors, tmp_path):
    assert holds_drafter(written(tmp_path / "given", config, {name: np.zeros(2) for name in tensors})) == drafts
    assert parted([str(tmp_path / "given")])[drafts] and not holds_drafter(tmp_path / "none")


def test_shipped_drafters_are_told_from_models():
    assert parted(["pycode-draft", "pycode-eagle-3"]) == (["pycode-draft"], ["pycode-eagle-3"])
