"""The gated delta rule: the recurrence token by token, in chains, trees and chunks; files with tensors that are not
read; what is refused."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.cache import LinearRecurrent
from decodax.core.window import Window, causal
from decodax.io.checkpoint import CheckpointError
from decodax.io.saving import save_model
from decodax.models import Transformer, llama
from decodax.models.blocks.options import Layer, OutputGate
from decodax.models.config import DecoderConfig
from decodax.models.families import read_config
from decodax.models.recurrent.gated_delta import DeltaBlock
from decodax.models.recurrent.options import GatedDelta, RgLru
from tests.matrix import often

G, H, N, P, START = 2, 4, 5, 3, 4
PARENTS = [-1, 0, 0, 1, 2, 2, 5]
DEPTH = [0, 1, 1, 2, 2, 2, 3]


def nodes(count: int, seed: int, channels: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    """Inputs of the recurrence of one row, with keys of length 1, rates up to 2, and decays of heads or channels."""
    r = np.random.default_rng(seed)
    k = r.normal(size=(1, count, G, N))
    return dict(q=r.normal(size=(1, count, G, N)), k=k / np.linalg.norm(k, axis=-1, keepdims=True),
                v=r.normal(size=(1, count, H, P)), decay=-np.abs(r.normal(size=(1, count, H, *channels))),
                x=r.normal(size=(1, count, 2)), rate=r.uniform(0, 2, size=(1, count, H)))


def one_by_one(state: np.ndarray, x: dict[str, np.ndarray], parents: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs `[W, H, P]` and the state after each node, `[H, N, P]`, in float64."""
    states: list[np.ndarray] = []
    for i, parent in enumerate(parents):
        decay = np.exp(x["decay"][0, i]).reshape(H, -1, 1)
        own = (state if parent < 0 else states[parent]) * decay
        k = np.repeat(x["k"][0, i], H // G, 0)
        told = x["v"][0, i] - np.einsum("hnp,hn->hp", own, k)
        states.append(own + np.einsum("hn,hp->hnp", k, x["rate"][0, i][:, None] * told))
    read = [np.einsum("hnp,hn->hp", s, np.repeat(q, H // G, 0)) for s, q in zip(states, x["q"][0], strict=True)]
    return np.stack(read), states


def cache(state: np.ndarray) -> LinearRecurrent:
    return LinearRecurrent(rings=(jnp.ones((1, 3, 2)),), states=(jnp.asarray(state, jnp.float32)[None],),
                           length=jnp.full(1, START, jnp.int32), size=256)


@functools.partial(jax.jit, static_argnames="chunk")
def run(cache: Any, x: dict[str, Any], window: Window, chunk: int) -> tuple[Any, Any]:
    return cache.recur(0, x["q"], x["k"], x["v"], x["decay"], x["x"], window, rate=x["rate"], chunk=chunk)


def recur(cache: Any, x: dict[str, np.ndarray], window: Window, chunk: int = 64) -> tuple[Any, Any]:
    return run(cache, {name: part.astype(np.float32) for name, part in x.items()}, window, chunk)


def tree(which: list[int], dead: int | None = None) -> Window:
    """Nodes of `PARENTS` as a window, whose mask says which ancestors among them each has."""
    above: list[set[int]] = []
    for i, parent in enumerate(PARENTS):
        above.append({i} | (above[parent] if parent >= 0 else set()))
    count = len(which)
    return Window(tokens=jnp.zeros((1, count), jnp.int32), live=jnp.asarray([[i != dead for i in which]]),
                  positions=jnp.asarray([[START + DEPTH[i] for i in which]], jnp.int32),
                  mask=jnp.asarray([[[j in above[i] for j in which] for i in which]]))


def slots(path: list[int], count: int) -> Any:
    return jnp.asarray([[START + DEPTH[i] if i in path else -1 for i in range(count)]], jnp.int32)


STATE = np.random.default_rng(0).normal(size=(H, N, P))
KINDS = pytest.mark.parametrize("channels", [(), (N,)], ids=["heads", "channels"])
"""Each head has a decay, or each channel of its keys."""


@KINDS
def test_a_tree_is_read_and_committed_as_if_each_path_were_a_text(channels: tuple[int, ...]) -> None:
    """Beside a dead node, with infinite decay."""
    x = nodes(7, 1, channels)
    x["decay"][0, 3] = -1e9
    want, states = one_by_one(STATE, x, PARENTS)
    y, entry = recur(cache(STATE), x, tree([*range(7)], dead=3))
    np.testing.assert_allclose(np.delete(y[0], 3, 0), np.delete(want, 3, 0), atol=3e-6)
    for path in ([0], [0, 1], [0, 2, 5, 6]):
        after = cache(STATE).commit([entry], slots(path, 7))
        np.testing.assert_allclose(after.states[0][0], states[path[-1]], atol=3e-6)
        assert after.length.tolist() == [START + len(path)]
    same = cache(STATE).commit([entry], slots([], 7))
    np.testing.assert_array_equal(same.states[0], cache(STATE).states[0])


@pytest.mark.wide
@KINDS
def test_a_tree_that_grows_level_by_level_in_a_buffer(channels: tuple[int, ...]) -> None:
    whole_tree = nodes(7, 1, channels)
    want, states = one_by_one(STATE, whole_tree, PARENTS)
    buffer: Any = None
    levels = [[0], [1, 2], [3, 4, 5], [6]]
    whole, at = tree([*range(7)]).mask, 0
    for level in levels:
        x = {name: part[:, level] for name, part in whole_tree.items()}
        if buffer is None:
            buffer = cache(STATE).tree_buffer([recur(cache(STATE), x, tree(level))[1]], 7)
        sees = jnp.zeros((1, len(level), 7), bool).at[:, :, :at].set(whole[:, level, :at])
        y, entry = recur(buffer.seen_by(sees), x, tree(level))
        np.testing.assert_allclose(y[0], want[level], atol=3e-6)
        buffer, at = buffer.append([entry], tree(level).positions, at), at + len(level)
    after = buffer.commit(slots([0, 2, 5, 6], 7))
    np.testing.assert_allclose(after.states[0][0], states[6], atol=3e-6)


@pytest.mark.parametrize("chunk", often([4], [4, 64]))
@KINDS
def test_a_prompt_in_chunks(channels: tuple[int, ...], chunk: int) -> None:
    """The tree has 21 nodes, and five of them are dead."""
    x, live = nodes(21, 2, channels), np.ones((1, 21), bool)
    live[:, [0, 7, 8, 19, 20]] = False
    window = causal(jnp.zeros((1, 21), jnp.int32), jnp.full(1, START), jnp.asarray(live)).replace(is_prefill=True)
    y, entry = recur(cache(STATE), x, window, chunk=chunk)
    want, states = one_by_one(STATE, {name: part[:, live[0]] for name, part in x.items()}, [*range(-1, 15)])
    np.testing.assert_allclose(y[0][live[0]], want, atol=5e-6)
    after = cache(STATE).commit([entry], jnp.where(window.live, window.positions, -1))
    np.testing.assert_allclose(after.states[0][0], states[-1], atol=5e-6)


DELTA = Layer(recurrent=GatedDelta(2, 4, 6, 5, chunk=8))
BASE = llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256)
ENTRIES = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 8,
           "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
           "linear_key_head_dim": 4, "linear_value_head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10}


def test_a_state_does_not_grow_with_the_text_and_a_draft_has_none_of_its_own() -> None:
    config = DecoderConfig(**{**vars(BASE), "layers": (DELTA, BASE.layers[1])})
    model = Transformer(config)
    for size in (64, 4096):
        assert [x.shape for x in model.init_cache(2, size).linear.states] == [(2, 4, 6, 5)]
    def entries() -> Any:
        window = causal(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
        return model.apply(model.init_params(jax.random.key(0)), window, model.init_cache(2, 64)).entries

    entry = jax.eval_shape(entries)[0]
    assert (entry.keys.shape, entry.values.shape) == ((2, 3, 2, 6), (2, 3, 4, 5))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_files_with_further_layers_and_with_stacked_experts(family: str, tmp_path: Path) -> None:
    config = {"model_type": family, **ENTRIES}
    model = Transformer(read_config(config))
    assert [layer.recurrent is None for layer in model.config.layers] == [False, False, False, True]
    params = model.init_params(jax.random.key(0))
    save_model(tmp_path, model, params, config)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for i in range(4):
        experts = f"model.layers.{i}.mlp.experts."
        gate, up, down = (np.stack([tensors.pop(f"{experts}{e}.{part}_proj.weight") for e in range(4)])
                          for part in ("gate", "up", "down"))
        tensors |= {f"{experts}gate_up_proj": np.concatenate([gate, up], 1), f"{experts}down_proj": down}
    save_file({**tensors, "mtp.norm.weight": np.ones(16, np.float32)}, file)
    with pytest.warns(UserWarning, match=r"skips 1 tensors of layers that predict further tokens, such as mtp\.norm"):
        lm = dx.load(tmp_path)
    assert lm.model == model
    jax.tree.map(np.testing.assert_array_equal, lm.params, params)
    (tmp_path / "config.json").write_text(json.dumps({**config, "linear_key_head_dim": 5}))
    with pytest.raises(CheckpointError, match="the configuration requires"), pytest.warns(match="skips 1"):
        dx.load(tmp_path)


@pytest.mark.wide
def test_the_block_of_kimi_linear_is_that_of_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = transformers.KimiLinearConfig(hidden_size=16, linear_head_dim=6, linear_num_heads=2, num_hidden_layers=2,
                                           layer_types=["linear_attention", "full_attention"])
    torch.manual_seed(0)
    theirs = KimiLinearDeltaAttention(config, 0).float()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    w = {name: x.numpy() for name, x in theirs.state_dict().items()}
    block = DeltaBlock(BASE, GatedDelta(2, 2, 6, 6, rank=6, eps=config.rms_norm_eps, chunk=4), nnx.Rngs(0))
    for ours, name in {"in_q": "q_proj", "in_k": "k_proj", "in_v": "v_proj", "in_b": "b_proj", "out": "o_proj",
                       "low_a": "forget_gate.f_a_proj", "in_a": "forget_gate.f_b_proj", "low_z": "g_a_proj",
                       "in_z": "g_b_proj"}.items():
        getattr(block, ours).kernel.set_value(jnp.asarray(w[f"{name}.weight"].T))
    for ours, taps in zip(("q_taps", "k_taps", "v_taps"), np.split(w["conv1d.weight"].T, 3, -1), strict=True):
        getattr(block, ours).set_value(jnp.asarray(taps))
    block.A_log.set_value(jnp.asarray(w["forget_gate.A_log"].reshape(-1, 1)))
    block.dt_bias.set_value(jnp.asarray(w["forget_gate.dt_bias"].reshape(-1)))
    block.y_norm.scale.set_value(jnp.asarray(w["o_norm.weight"]))
    x = np.random.default_rng(0).normal(size=(2, 19, 16)).astype(np.float32)
    got = block(0, jnp.asarray(x), {}, lambda i, q, k, v, walk: (walk.over_text(), ()))[0]
    with torch.no_grad():
        np.testing.assert_allclose(got, theirs(torch.tensor(x)).numpy(), atol=2e-5)


def test_wrong_configurations_are_refused_by_name() -> None:
    qwen = {"model_type": "qwen3_5_text", **ENTRIES}
    with pytest.raises(ValueError, match=r"^linear_num_value_heads: got 3, takes a multiple of linear_num_key_heads"):
        read_config({**qwen, "linear_num_key_heads": 2, "linear_num_value_heads": 3})
    with pytest.raises(ValueError, match=r"^attn_output_gate: got False, supported is True"):
        read_config({**qwen, "attn_output_gate": False})
    with pytest.raises(ValueError, match=r"^hidden_act: got 'gelu', supported is 'silu'"):
        read_config({**qwen, "hidden_act": "gelu"})
    with pytest.raises(ValueError, match=r"^layer_types: got \['linear_attention'\], takes 'full_attention' or"):
        read_config({**qwen, "layer_types": ["linear_attention"]})
    with pytest.raises(ValueError, match=r"^layer_types: got .*, takes a list of 'full_attention' and 'sliding_"):
        read_config({**qwen, "model_type": "qwen3", "layer_types": ["linear_attention"] * 4})
    with pytest.raises(ValueError, match=r"^attn_output_gate: got True, which a qwen3 model does not have here"):
        read_config({**qwen, "model_type": "qwen3", "attn_output_gate": True})
    with pytest.raises(ValueError, match=r"^value_heads: got 3, takes a multiple of key_heads = 2"):
        GatedDelta(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"^rate: got 3"):
        GatedDelta(2, 4, 4, 4, rate=3)
    with pytest.raises(ValueError, match=r"^floor: got 1.0, takes a number below 0, or 0"):
        GatedDelta(2, 4, 4, 4, floor=1.0)
    with pytest.raises(ValueError, match=r"^key_dim: got 0"):
        GatedDelta(2, 4, 0, 4)
    of = lambda *layers, **more: DecoderConfig(**{**vars(BASE), "layers": layers, **more})
    with pytest.raises(ValueError, match=r"^recurrent: got blocks of several kinds"):
        of(DELTA, Layer(recurrent=RgLru(8, 2)), BASE.layers[0])
    with pytest.raises(ValueError, match=r"^block: got one of a layer in a decoder with parallel blocks"):
        of(Layer(block="post"), BASE.layers[0], block="parallel")
    with pytest.raises(ValueError, match=r"^recurrent: cannot be combined with options of attention"):
        Layer(recurrent=DELTA.recurrent, output_gate=OutputGate("channels"))
