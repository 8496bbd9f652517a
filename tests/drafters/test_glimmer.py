"""The assistant of Muse Glimmer drafts as that of transformers, and changes no output."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import decodax as dx
from decodax import algorithms
from decodax.algorithms.speculative.heads.drafting import drafting_source
from decodax.core import drivers
from decodax.core.types import Params
from decodax.io.drafters import load_drafter, save_drafter
from decodax.io.files import CheckpointError
from decodax.sampling import build as policy
from tests.drafters.drafting import drafted_logits
from tests.models import tiny

pytestmark = pytest.mark.wide

V, BLOCK, WINDOW = 96, 4, 6
ASSISTANT = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 0.05, "max_position_embeddings": 64,
             "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "block_size": BLOCK,
             "mask_token_id": V - 1, "target_layer_ids": [0, 1]}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 9, 31, 40, 3], [9, 10, 11]]      # one is longer than the window


class Case:
    """A target with its assistant, in transformers and here."""

    def __init__(self, directory):
        self.target, self.path = tiny.build("muse-glimmer", vocab_size=V), directory / "assistant"
        self.target.save_pretrained(directory / "target")
        config = transformers.AutoConfig.for_model("muse_glimmer_assistant", **ASSISTANT)
        config._attn_implementation = "eager"
        torch.manual_seed(1)
        self.assistant = transformers.MuseGlimmerAssistantModel(config).eval()
        with torch.no_grad():
            for weight in self.assistant.parameters():
                weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
        self.assistant.save_pretrained(self.path)
        self.lm = dx.load(directory / "target")
        self.drafter = load_drafter(self.path, self.lm)

    def drafts(self, ids):
        """Logits of the drafts after a text, `f32[BLOCK - 1, V]`."""
        text, table = self.target.config.text_config, self.target.get_input_embeddings().weight
        with torch.no_grad():
            out = self.target(input_ids=torch.tensor([ids[:-1]]), use_cache=False, output_hidden_states=True)
            context = torch.cat([out.hidden_states[i + 1] for i in ASSISTANT["target_layer_ids"]], -1)
            cache = transformers.cache_utils.DFlashCache(config=self.assistant.config)
            cache.set_previous_accepted_tokens(len(ids) - 1)
            block = torch.tensor([[ids[-1]] + [V - 1] * (BLOCK - 1)])
            found = self.assistant(noise_embeds=table[block], cache=cache,
                                   context_hidden_states=context).last_hidden_state[0, 1:]
            logits = self.target.lm_head(found) * text.output_multiplier
        cap = text.final_logit_softcapping
        return (torch.tanh(logits / cap) * cap).numpy()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("glimmer"))


def test_drafts_are_those_of_transformers(case):
    """Prompts are read in chunks."""
    assert (case.drafter.system, case.drafter.head.taps) == ("dflash", (0, 1))
    alg = algorithms.make("dflash", case.lm, case.drafter)
    bare, tokens, size = alg.bare(), np.zeros((2, 32), np.int32), np.array(list(map(len, PROMPTS)), np.int32)
    for row, given in zip(tokens, PROMPTS, strict=True):
        row[:len(given)] = given
    each, chain, params = (lambda x: np.full(2, x)), policy(2, vocab_size=V), Params(case.lm.params, alg.weights)
    s = drivers.begin(bare, case.lm.model, params, chain, jnp.asarray(tokens), size, size=32, max_new=each(8),
                      min_new=each(0), seed=each(0).astype(np.uint32))
    s = drivers.prefill(bare, case.lm.model, params, s, width=4)
    found, _ = jax.jit(functools.partial(drafted_logits, bare.draft))(params, s, jnp.zeros((2, BLOCK - 2), jnp.int32))
    for row, ids in enumerate(PROMPTS):
        np.testing.assert_allclose(found[row], case.drafts(ids), atol=1e-4)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_output_is_plain_decodings(case, shape):
    """Greedy and sampled rows in one ragged batch."""
    run = lambda **options: dx.generate(case.lm, PROMPTS, max_new_tokens=12, eos_token_id=[], seed=3, **options,
                                        temperature=[0.0, 1.2])
    of_tree = dx.Speculative(drafting_source(case.lm, case.drafter), shape=dx.trees.Fixed.balanced(2, 2))
    found = run(algorithm=of_tree if shape == "tree" else algorithms.make("dflash", case.lm, case.drafter))
    np.testing.assert_array_equal(found.tokens, run().tokens)


def test_a_saved_one_is_loaded_again_and_what_does_not_fit_is_named(case, tmp_path):
    save_drafter(tmp_path / "own", case.drafter, dtype="float32")
    back = load_drafter(tmp_path / "own", case.lm)
    assert back.head == case.drafter.head and back.system == "dflash"
    jax.tree.map(np.testing.assert_array_equal, back.params, case.drafter.params)
    with pytest.raises(CheckpointError, match="has no vocabulary of its own; takes target="):
        load_drafter(case.path)
    entries = json.loads((case.path / "config.json").read_text())
    shutil.copytree(case.path, tmp_path / "other")
    for changes, message in (({"block_size": 8}, "block_size: got 8, takes at most one more than sliding_window = 6"),
                             ({"target_layer_ids": [0, 2]}, "reads the output of the last layer, 2"),
                             ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, r"layers\.1\.")):
        (tmp_path / "other" / "config.json").write_text(json.dumps(entries | changes))
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path / "other", case.lm)
