"""Heads that read the drafted tokens one by one give the numbers of their authors' code."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.io.drafters import load_drafter
from decodax.io.files import CheckpointError
from decodax.io.load import LM
from decodax.models import llama
from decodax.models.drafters.chimera import ChimeraHead
from decodax.models.drafters.clover import CloverHead
from decodax.models.drafters.hydra import HydraHead
from decodax.models.names import LLAMA, flatten
from decodax.models.transformer import Transformer
from decodax.models.weight_source import nested
from decodax.train.drafting.unrolled import unrolled
from tests.drafters import given
from tests.drafters.test_published import Table, written

AUTHORS = json.loads((Path(__file__).parent / "sequential.json").read_text())
WIDTH, VOCAB = AUTHORS["features"], AUTHORS["vocabulary"]
layers = lambda count: llama(vocab=VOCAB, width=WIDTH, layers=count, heads=4, kv_heads=2, head_dim=4, mlp=24,
                             context=64, eps=1e-6)
HEADS = {
    "hydra-plus-plus": HydraHead((), VOCAB, width=WIDTH, heads=3, blocks=4, prefix=layers(1)),
    "clover-2": CloverHead((), VOCAB, width=WIDTH, heads=3, prefix=layers(2), tokens_first=True),
    "chimera": ChimeraHead((), VOCAB, config=layers(1), heads=3),
}
THEIRS = {
    "hydra-plus-plus": [
        (r"prefix\.", "prefix_embeding_layer."), (r"heads\.(\d)\.residual", r"hydra_mlp.\1.1.res_connection"),
        (r"heads\.(\d)\.first", r"hydra_mlp.\1.1.linear"), (r"heads\.(\d)\.block", r"hydra_mlp.\1.3.linear"),
        (r"heads\.(\d)\.head", r"hydra_lm_head.\1.1")],
    "clover-2": [
        (r"prefix\.norm", "clover_norm"), (r"prefix\.", ""), (r"^norm", "clover_head_norm"),
        (r"output_drafted", "clover_head_mlp2"), (r"output", "clover_head_mlp"), (r"newest\.", "clover_head_mlp_rnn."),
        (r"decoder\.", "clover_head_mlp_rnn2."), (r"(rnn2?)\.norm", r"\1.input_layernorm")],
    "chimera": [(r"layers\.0", "fast_layer1.0"), (r"^trigram", "trimlp.0.linear"), (r"^project", "trimlp.1"),
                (r"heads\.(\d)", r"chimera_head.\1.0")],
}
"""The names of the authors' code for ours, as patterns that are replaced in turn."""


def their_name(case: str, ours: str) -> str:
    name = re.sub(r"\.(kernel|scale)$", ".weight", ours)
    for mine, theirs in LLAMA.items():
        name = re.sub(rf"(layers\.\d)\.{re.escape(mine)}\.", rf"\1.{theirs}.", name)
    for pattern, replacement in THEIRS[case]:
        name = re.sub(pattern, replacement, name)
    return name


def weights_of(case):
    """Our weights with the values of the case, and their names in the authors' code."""
    names = {ours: their_name(case["name"], ours) for ours in flatten(HEADS[case["name"]].abstract_params())}

    def read(ours, theirs):
        x = given.tensor(theirs, tuple(case["shapes"][theirs]))
        x = np.roll(x, WIDTH, 1) if theirs.startswith("chimera_head") else x        # theirs reads the state first
        return jnp.asarray(x.T if ours.endswith("kernel") else x)

    return nested({ours: read(ours, theirs) for ours, theirs in names.items()}), names


@pytest.mark.wide(but=("clover-2",))
@pytest.mark.parametrize("case", AUTHORS["cases"], ids=lambda case: case["name"])
def test_a_head_computes_what_its_authors_code_does(case):
    head, (weights, names) = HEADS[case["name"]], weights_of(case)
    assert sorted(names.values()) == sorted(case["shapes"])
    features, ids = given.inputs(AUTHORS["positions"], WIDTH, VOCAB)
    steps = jax.jit(lambda weights: unrolled(
        Table(), head, weights, given.tensor("target.embed", (VOCAB, WIDTH)),
        jnp.asarray(np.pad(ids, ((0, 0), (1, 0)))), jnp.pad(features, ((0, 0), (0, 1), (0, 0))),
        len(case["values"])))(weights)
    for (logits, hidden), wanted in zip(steps, case["values"], strict=True):
        got = logits if head.own_head else hidden
        np.testing.assert_allclose(got[0, :len(wanted)], wanted, atol=2e-5, rtol=1e-4)


def test_a_published_file_of_hydra_plus_plus_is_read_beside_its_target(tmp_path):
    case = next(case for case in AUTHORS["cases"] if case["name"] == "hydra-plus-plus")
    tensors = {name: given.tensor(name, tuple(shape)) for name, shape in case["shapes"].items()}
    tensors |= {name.replace(".3.linear", f".{j}.linear"): x for j in (5, 7) for name, x in tensors.items()
                if ".3.linear" in name}
    tensors["prefix_embeding_layer.embed_tokens.weight"] = np.zeros((VOCAB, WIDTH), np.float32)
    path = written(tmp_path, dict(hydra_num_heads=3, hydra_num_layers=4, hydra_head_arch="prefix-mlp"), tensors)
    with pytest.raises(CheckpointError, match=r"leaves the shape of its first layer to the target, takes load_drafter"):
        load_drafter(path)
    made = load_drafter(path, LM(model=Transformer(layers(2)), params=None, vocab_size=VOCAB))
    assert made.system == "hydra-plus-plus" and made.head.blocks == 4 and made.head.longest == 3
    assert len(made.head.prefix.layers) == 1
    jax.tree.map(np.testing.assert_array_equal, made.params, weights_of(case)[0])
