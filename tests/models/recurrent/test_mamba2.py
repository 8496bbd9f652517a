"""Mamba-2 against transformers, and its products against the recurrence one token after the other."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.bench.plan import plan
from decodax.cache import LinearRecurrent
from decodax.core.window import causal
from decodax.engine.queue import Ticket, schedule
from decodax.engine.request import Request
from decodax.io.files import CheckpointError
from decodax.models import Mamba2, Mamba2Config
from tests.models.networks.mamba2 import VOCABULARY, with_random_weights
from tests.models.small import NEW, POLICY, PROMPTS, attention, scored, shapes_in, tokens_of

SHAPE = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=2,
             state_size=6, conv_kernel=4, chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CASES = {"groups": {}, "one-group": dict(n_groups=1, use_bias=True, use_conv_bias=False, tie_word_embeddings=True,
                                         conv_kernel=3, chunk_size=5),
         "bounded-steps": dict(time_step_limit=(0.3, 0.9))}
"""Prompts of `PROMPTS` are longer and shorter than a chunk."""


@functools.cache
def written(case: str) -> tuple[Any, Path]:
    """A tiny model of transformers with random weights, and its directory."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**SHAPE, **CASES[case]})).eval()
    return with_random_weights(model)


@functools.cache
def loaded(case: str = "groups") -> Any:
    return dx.load(written(case)[1])


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Any, params: Any, tokens: Any) -> Any:
    return model.forward(params, tokens)


def last_of(lm: Any, texts: list[list[int]]) -> np.ndarray:
    """The logits `[n, V]` behind each text, from its full forward."""
    width = max(map(len, texts))
    logits = forward(lm.model, lm.params, np.array([text + [0] * (width - len(text)) for text in texts]))
    return np.asarray(logits)[np.arange(len(texts)), [len(text) - 1 for text in texts]]


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str) -> None:
    """Of a batch without padding, and of prompts of different lengths, each alone there and together here."""
    import torch

    reference, lm = written(case)[0], loaded(case)
    text = np.random.default_rng(0).integers(3, VOCABULARY, (2, 21))
    with torch.no_grad():
        want = reference(torch.tensor(text), use_cache=False).logits.numpy()
    np.testing.assert_allclose(forward(lm.model, lm.params, text), want, atol=1e-4)
    reference.generation_config.eos_token_id = None
    # transformers 5.24 keeps the bounds of steps where it reads a text and drops them where it goes on by one token
    options = dict(use_cache="time_step_limit" not in CASES[case])
    new = [reference.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)[0]
           for prompt in PROMPTS]
    new = [row.tolist()[len(prompt):] for row, prompt in zip(new, PROMPTS, strict=True)]
    assert tokens_of(lm) == new
    assert tokens_of(lm, chunk=16) == new            # two chunks of the recurrence, and a rest
    assert len({token for row in new for token in row}) > 8


def test_a_left_padded_batch_equals_transformers() -> None:
    """Dead nodes stand in front of the text, as in a batch of its `generate`."""
    import torch

    reference, lm = written("groups")[0], loaded()
    live = np.arange(12) >= np.array([[0], [5]])
    text = np.where(live, np.random.default_rng(1).integers(3, VOCABULARY, (2, 12)), 0)
    with torch.no_grad():
        want = reference(torch.tensor(text), attention_mask=torch.tensor(live).long(), use_cache=False).logits.numpy()
    window = causal(jnp.asarray(text), -jnp.array([0, 5]), jnp.asarray(live))
    for certain in (False, True):
        got, _ = scored(lm.model, lm.params, window.replace(is_prefill=certain), lm.model.init_cache(2, 32))
        np.testing.assert_allclose(np.asarray(got)[live], want[live], atol=1e-4)


def recurrence(q: Any, k: Any, v: Any, decay: Any) -> tuple[Any, Any]:
    """One token after the other, in float64: outputs `[T, H, P]` and the last state `[H, N, P]`."""
    q, k = (np.repeat(a, v.shape[1] // a.shape[1], 1).astype(np.float64) for a in (q, k))
    state, read = np.zeros((v.shape[1], k.shape[2], v.shape[2])), []
    for i in range(len(v)):
        state = np.exp(decay[i].astype(np.float64))[:, None, None] * state + np.einsum("hn,hp->hnp", k[i], v[i])
        read.append(np.einsum("hn,hnp->hp", q[i], state))
    return np.array(read), state


@pytest.mark.wide(but=("True-0.1", "True-30.0", "True-500.0", "False-30.0", "False-500.0"))
@pytest.mark.parametrize("scale", [0.1, 30.0, 500.0])
@pytest.mark.parametrize("certain", [False, True])
def test_products_equal_the_recurrence_however_fast_it_forgets(scale: float, certain: bool) -> None:
    """Sums of decays grow to thousands; neighbours keep the digits of their difference. With dead nodes between."""
    keys, T = jax.random.split(jax.random.key(0), 4), 50
    q, k = (jax.random.normal(key, (1, T, 2, 5)) for key in keys[:2])
    v = jax.random.normal(keys[2], (1, T, 4, 3))
    # most nodes forget little, some nearly everything
    decay = -scale * jax.random.uniform(keys[3], (1, T, 4)) ** 8
    live = np.arange(T) % 7 != 3
    cache = LinearRecurrent(rings=(jnp.zeros((1, 0, 1)),), states=(jnp.zeros((1, 4, 5, 3)),),
                            length=jnp.zeros(1, jnp.int32), size=64)
    window = causal(jnp.zeros((1, T), jnp.int32), jnp.zeros(1, jnp.int32), jnp.asarray(live)[None])
    y, entry = cache.recur(0, q, k, v, decay, jnp.zeros((1, T, 1)), window.replace(is_prefill=certain), chunk=16)
    slots = jnp.where(live, jnp.cumsum(live) - 1, -1)[None]
    want, state = recurrence(*(np.asarray(a[0])[live] for a in (q, k, v, decay)))
    np.testing.assert_allclose(np.asarray(y)[0, live], want, atol=2e-5)
    np.testing.assert_allclose(cache.commit([entry], slots).states[0][0], state, atol=2e-5)


@pytest.mark.parametrize("certain", [False, True])
def test_no_node_has_a_state_of_its_own(certain: bool) -> None:
    """Of 64 nodes no array holds more than a few states; within a chunk the nodes' decays are the largest."""
    model = Mamba2(Mamba2Config(vocab=16, width=32, layers=1, heads=2, head_dim=32, state=32, chunk=16))

    def read(tokens: Any) -> Any:
        window = causal(tokens, jnp.zeros(1, jnp.int32)).replace(is_prefill=certain)
        cache = model.init_cache(1, 64)
        return cache.commit(model.apply(model.init_params(jax.random.key(0)), window, cache).entries, window.positions)

    found = [shape for shape in shapes_in(jax.make_jaxpr(read)(jnp.zeros((1, 64), jnp.int32)).jaxpr)
             if shape[-2:] == (32, 32)]
    assert found and max(int(np.prod(shape)) for shape in found) == 2 * 32 * 32


@pytest.mark.parametrize("tied", [False, True])
def test_the_names_of_state_spaces_are_read(tied: bool, tmp_path: Path) -> None:
    """The same weights under the names, and with the configuration, of state-spaces/mamba."""
    tensors = {name.replace("embeddings", "embedding"): x
               for name, x in load_file(written("groups")[1] / "model.safetensors").items()}
    if tied:
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"d_model": 32, "n_layer": 2, "vocab_size": VOCABULARY, "pad_vocab_size_multiple": 1, "rms_norm": True,
              "d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}, "residual_in_fp32": True,
              "fused_add_norm": True, "tie_embeddings": tied,
              "ssm_cfg": {"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2, "chunk_size": 8}}
    write = lambda c: (tmp_path / "config.json").write_text(json.dumps(c))
    write(config)
    lm = dx.load(tmp_path)
    assert lm.model == Mamba2(dataclasses.replace(loaded().model.config, tied=tied))
    if not tied:
        assert tokens_of(lm) == tokens_of(loaded())
    for changes, message in (({"ssm_cfg": {"layer": "Mamba1"}}, r"ssm_cfg.layer: got 'Mamba1', supported is 'Mamba2'"),
                             ({"attn_layer_idx": [1]}, r"attn_layer_idx: got \[1\], supported is \[\]"),
                             ({"d_intermediate": 8}, "d_intermediate: got 8, supported is 0")):
        write(config | changes)
        with pytest.raises(CheckpointError, match=message):
            dx.load(tmp_path)


def test_packed_weights_are_close() -> None:
    lm = dx.load(written("groups")[1], weights="int8")
    text = jnp.array([PROMPTS[0]])
    whole, packed = (forward(each.model, each.params, text) for each in (loaded(), lm))
    assert 1e-4 < jnp.abs(whole - packed).max() < 0.1 * jnp.abs(whole).max()


def test_unsupported_methods_and_files_are_refused_by_name(tmp_path: Path) -> None:
    lm = loaded()
    with pytest.raises(ValueError, match=r"cache: got .*, but Mamba2 has a cache of its own"):
        tokens_of(lm, cache="knorm")
    with pytest.raises(ValueError, match=r"cache: Speculative\(CLaSp\) needs one that supports truncation, which "
                                         "LinearRecurrent does not"):
        tokens_of(lm, algorithm=dx.Speculative(dx.drafts.CLaSp(skips=1).for_target(attention(VOCABULARY))))
    with pytest.raises(ValueError, match=r"context: got one for .*a Mamba-2 runs on one device"):
        dx.load(written("groups")[1], context=64)
    with pytest.raises(ValueError, match="model: got a Mamba2, takes a Transformer"):
        plan(lm, "v5e:2x2")
    with pytest.raises(ValueError, match="inputs: Mamba2 takes none"):
        tokens_of(lm, inputs=np.zeros((4, 1)))
    config = json.loads((written("groups")[1] / "config.json").read_text())
    for changes, message in (({"hidden_act": "gelu"}, "hidden_act: got 'gelu', supported is 'silu'"),
                             ({"num_heads": 7}, "num_heads: got 7 of head_dim = 8, takes expand"),
                             ({"n_groups": 3}, "groups: got 3, takes a divisor of heads = 8"),
                             ({"time_step_limit": [1]}, r"time_step_limit: got \[1\], takes two numbers")):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            dx.load(tmp_path)


@pytest.mark.wide
def test_slots_and_beams_give_the_tokens_of_a_full_forward() -> None:
    """A prompt that takes the place of another, and the best of four beams."""
    lm = loaded()
    new = [3, 8, 5, 1]
    options: dict[str, Any] = dict(max_new_tokens=new, eos_token_id=[], **POLICY)
    request = Request.read(lm, PROMPTS, **options)
    found = dict(schedule((Ticket(request.select([i]), i) for i in (2, 0, 3, 1)), 2))
    together = dx.generate(lm, PROMPTS, **options).tokens.tolist()
    assert [found[i].tokens[0].tolist()[:n] for i, n in enumerate(new)] == [
        row[:n] for row, n in zip(together, new, strict=True)]

    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(4):
        scores = jax.nn.log_softmax(last_of(lm, [PROMPTS[1] + text for text, _ in beams]))
        beams = sorted((([*text, token], score + float(row[token])) for (text, score), row in
                        zip(beams, np.asarray(scores), strict=True) for token in np.argsort(-row)[:4].tolist()),
                       key=lambda beam: -beam[1])[:4]
    best = dx.generate(lm, [PROMPTS[1]], max_new_tokens=4, eos_token_id=[], algorithm="beam-search:width=4")
    assert best.tokens[0].tolist() == beams[0][0]
