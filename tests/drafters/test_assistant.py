"""Assistants of Gemma 4 draft as those of transformers, and change no output."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import decodax as dx
from decodax import algorithms
from decodax.algorithms.speculative.heads.drafting import drafting_source
from decodax.core import drivers
from decodax.core.types import Params
from decodax.io.drafters import load_drafter, save_drafter
from decodax.io.files import CheckpointError
from decodax.sampling import build as policy
from tests.drafters.drafting import drafted_logits
from tests.matrix import often
from tests.models import tiny

V, WIDTH, WINDOW = 96, 32, tiny.SMALL_WINDOW["sliding_window"]
TEXT = {"vocab_size": V, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
        "max_position_embeddings": 64, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "final_logit_softcapping": None}
SHARED_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# name: case of tests/models/tiny.py, options of the assistant's layers, and of the assistant
CASES = {"ordered": ("gemma4", {}, {"use_ordered_embeddings": True, "num_centroids": 12,
                                    "centroid_intermediate_top_k": 3}),
         "plain": ("gemma4", {}, {}), "moe": ("gemma4-moe", {**SHARED_KEYS, "attention_bias": True}, {}),
         "unified": ("gemma4-unified", {"attention_k_eq_v": True}, {})}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 9, 31], [9, 10, 11], [1]]


class Case:
    """A target with its assistant, in transformers and here."""

    def __init__(self, name, directory):
        case, text, options = CASES[name]
        kind = "gemma4_unified_assistant" if name == "unified" else "gemma4_assistant"
        more = {"vocab_size_per_layer_input": V} if case == "gemma4" else {}
        self.target, self.path = tiny.build(case, vocab_size=V, **more), directory / "assistant"
        self.target.save_pretrained(directory / "target")
        config = transformers.AutoConfig.for_model(kind, text_config={
            "model_type": self.target.config.model_type, **TEXT, **text}, backbone_hidden_size=WIDTH, **options)
        own = transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant if (
            name == "unified") else transformers.models.gemma4_assistant.modeling_gemma4_assistant
        make = own.Gemma4UnifiedAssistantForCausalLM if name == "unified" else own.Gemma4AssistantForCausalLM
        config._attn_implementation = config.text_config._attn_implementation = "eager"
        torch.manual_seed(1)
        self.assistant = make(config).eval()
        with torch.no_grad():
            for weight in self.assistant.parameters():
                weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
            for key, buffer in self.assistant.named_buffers():
                if "layer_scalar" in key:
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
                elif "token_ordering" in key:
                    buffer.copy_(torch.randperm(V))
        self.assistant.save_pretrained(self.path)
        self.lm = dx.load(directory / "target")
        self.drafter = load_drafter(self.path, self.lm)

    def read(self, ids):
        """Returns what the assistant reads of the target after all tokens but the last: the last hidden state, and the
        keys and values, of sliding layers only those in the window of the last token."""
        with torch.no_grad():
            out = self.target(input_ids=torch.tensor([ids[:-1]]), use_cache=False, output_hidden_states=True,
                              return_shared_kv_states=True)
        shared = {kind: tuple(x[:, :, -(WINDOW - 1):] if kind == "sliding_attention" else x for x in pair)
                  for kind, pair in out.shared_kv_states.items()}
        return out.hidden_states[-1][:, -1:], shared, out

    def drafts(self, ids, following):
        """Logits after a text and after each of the tokens drafted after it."""
        state, shared, _ = self.read(ids)
        where, found = torch.tensor([[len(ids) - 1]]), []
        for token in [ids[-1], *following]:
            with torch.no_grad():
                embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
                out = self.assistant(inputs_embeds=torch.cat([embedded, state], -1), position_ids=where,
                                     shared_kv_states=shared)
            state = out.last_hidden_state
            found.append(out.logits[0, -1].numpy())
        return np.stack(found)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Returns the case of a name."""
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


def state_after(own, rows):
    """The source of drafts, its parameters, and the state of decoding after prompts, of which the last token is the
    newest."""
    alg = algorithms.make("mtp", own.lm, own.drafter)
    bare = alg.bare()
    tokens, size = np.zeros((len(rows), 32), np.int32), np.array(list(map(len, rows)), np.int32)
    for row, given in zip(tokens, rows, strict=True):
        row[:len(given)] = given
    each, chain = (lambda x: np.full(len(rows), x)), policy(len(rows), vocab_size=V)
    params = Params(own.lm.params, alg.weights)
    s = drivers.begin(bare, own.lm.model, params, chain, jnp.asarray(tokens), size, size=32, max_new=each(8),
                      min_new=each(0), seed=each(0).astype(np.uint32))
    return bare.draft, params, drivers.prefill(bare, own.lm.model, params, s, width=4)


@pytest.mark.wide(but=("ordered",))
@pytest.mark.parametrize("name", often(["ordered", "moe"], CASES))
def test_drafts_are_those_of_transformers(case, name):
    """Prompts are read in chunks, and one is longer than the window."""
    own, rows = case(name), [row for row in PROMPTS if len(row) > 1]
    assert own.drafter.system == "mtp" and own.drafter.head.own_head
    source, params, s = state_after(own, rows)
    following = np.array([[3, 17, 40], [60, 2, 8]])
    found = np.asarray(jax.jit(functools.partial(drafted_logits, source))(params, s, jnp.asarray(
        following, jnp.int32))[0])
    for row, ids in enumerate(rows):
        wanted = own.drafts(ids, following[row].tolist())
        known = np.isfinite(found[row])
        # transformers gives tokens of other clusters one less than the least logit
        assert (known.sum(-1) == (V if name != "ordered" else 3 * V // 12)).all()
        assert (wanted[~known] <= wanted.min(-1, keepdims=True).repeat(V, -1)[~known]).all()
        np.testing.assert_allclose(found[row][known], wanted[known], atol=1e-4, rtol=1e-4)


@pytest.mark.wide
def test_a_greedy_chain_is_that_of_transformers(case):
    own, ids = case("ordered"), [9, 10, 11, 5]         # within the window, on whose border transformers differs
    source, params, s = state_after(own, [ids])
    run, chain = jax.jit(functools.partial(drafted_logits, source)), list[int]()
    for _ in range(4):
        following = jnp.asarray([chain + [0] * (4 - len(chain))], jnp.int32)
        chain.append(int(run(params, s, following)[0][0, len(chain)].argmax()))
    _, _, out = own.read(ids)
    config = transformers.GenerationConfig(max_length=32)
    made = SinglePositionMultiTokenCandidateGenerator(own.assistant, own.target.get_input_embeddings(), config)
    made.num_assistant_tokens = 4
    found, _ = made.get_candidates(torch.tensor([ids]), {}, out, False, 0)
    assert found[0, len(ids):].tolist() == chain


@pytest.mark.wide(but=("ordered-tree",))
@pytest.mark.parametrize(("name", "shape"), often([("ordered", "tree"), ("moe", "chain")],
                                                  itertools.product(CASES, ("chain", "tree"))))
def test_the_output_is_plain_decodings(case, name, shape):
    """Greedy and sampled rows in one ragged batch."""
    own = case(name)
    run = lambda **options: dx.generate(own.lm, PROMPTS, max_new_tokens=12, eos_token_id=[], seed=3, **options,
                                        temperature=[0.0, 0.8, 1.2])
    tree = dict(shape=dx.trees.Fixed.balanced(2, 2)) if shape == "tree" else dict(length=3)
    found = run(algorithm=algorithms.make("mtp", own.lm, own.drafter, **tree))
    np.testing.assert_array_equal(found.tokens, run().tokens)


def test_a_saved_one_is_loaded_again_and_automatic_takes_it(case, tmp_path):
    own = case("ordered")
    save_drafter(tmp_path, own.drafter, dtype="float32")
    back = load_drafter(tmp_path, own.lm)
    assert back.head == own.drafter.head and back.system == "mtp"
    np.testing.assert_array_equal(back.ids, own.drafter.ids)
    jax.tree.map(np.testing.assert_array_equal, back.params, own.drafter.params)
    assert drafting_source(own.lm, back).head == own.drafter.head


def test_what_does_not_fit_is_named(case, tmp_path):
    own, other = case("ordered"), case("moe")
    with pytest.raises(ValueError, match=r"layer 1 reads keys \(2, 16\) .*those of layer 2 of the target are \(1,"):
        dataclasses.replace(own.drafter).check(other.lm)
    tensors, entries = load_file(own.path / "model.safetensors"), json.loads((own.path / "config.json").read_text())

    def changed(tensors, **text):
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(
            {**entries, "text_config": {**entries["text_config"], **text}}))
        return tmp_path

    name = "masked_embedding.token_ordering"
    with pytest.raises(CheckpointError, match=rf"tensor {name} does not name each of the 96 tokens once"):
        load_drafter(changed({**tensors, name: np.zeros(V, np.int64)}))
    with pytest.raises(CheckpointError, match="lacks tensor pre_projection"):
        load_drafter(changed({key: x for key, x in tensors.items() if "pre_projection" not in key}))
    with pytest.raises(CheckpointError, match=r"text_config\.enable_moe_block: got True, an assistant has False"):
        load_drafter(changed(tensors, enable_moe_block=True))
