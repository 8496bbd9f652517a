"""Models that are no dense decoders fit without an edit of the core: the examples of `docs/extending`, and T5."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import Window, causal
from decodax.models import T5, Embeddings, EncoderText, Experts, Transformer, llama
from decodax.models.experts import mix, route
from decodax.models.layers import ACTIVATIONS
from decodax.models.t5 import relative_bias
from decodax.pallas_kernels.window_attention import by_position, window_attention
from tests.extending.pages import run_page

pytestmark = pytest.mark.wide      # the guide runs as it stands

VOCABULARY = 64
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [1, 5], [7, 7, 7, 7], [60]]
NEW = 12
POLICY: dict[str, Any] = dict(temperature=[0.0, 0.0, 1.0, 1.0], top_p=0.95, seed=[5, 6, 7, 8])
"""Two rows greedy, two sampled."""

LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))
TREE = dx.trees.Fixed.balanced(2, 2)


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The names of the examples."""
    return run_page("models")


@pytest.fixture(scope="module")
def recurrent(guide: dict[str, Any]) -> Any:
    return guide["recurrent"]


@functools.cache
def attention() -> Any:
    """A Llama over the same tokens, with weights that give distributions with a shape."""
    network = Transformer(llama(vocab=VOCABULARY, width=16, layers=2, heads=4, kv_heads=2, mlp=24))
    weights = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, network.init_params(jax.random.key(1)))
    return dx.LM(model=network, params=weights, vocab_size=VOCABULARY)


def tokens_of(lm: Any, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    return dx.generate(lm, prompts, **{"max_new_tokens": NEW, **options}).tokens.tolist()


@functools.partial(jax.jit, static_argnums=0)
def score(model: Any, params: Any, window: Window, inputs: Any = None) -> Any:
    """Logits of a window without a cache."""
    cache = model.init_cache(window.tokens.shape[0], 0, params=params, inputs=inputs)
    return model.apply(params, window, cache).logits()


@functools.partial(jax.jit, static_argnums=0)
def scored(model: Any, params: Any, window: Window, cache: Any) -> Any:
    """Logits, and the window's entries."""
    out = model.apply(params, window, cache)
    return out.logits(), out.entries


def chain(text: list[int]) -> Window:
    return causal(jnp.array([text]), jnp.zeros(1, jnp.int32))


def texts(prompts: list[list[int]], new: list[list[int]]) -> Window:
    """Whole texts side by side; what stands behind the shorter ones is seen by nobody that counts."""
    whole = [prompt + more for prompt, more in zip(prompts, new, strict=True)]
    width = max(map(len, whole))
    return causal(np.array([row + [0] * (width - len(row)) for row in whole]), jnp.zeros(len(whole), jnp.int32))


def test_the_guide_runs(guide: dict[str, Any]) -> None:
    assert guide["plain"].lengths.tolist() == [12, 12]
    assert guide["out"].lengths.tolist() == [8, 8]


# A recurrent model


def loop(lm: Any, text: list[int]) -> np.ndarray:
    """The gated delta net as its authors write it, one token after the other, in float64: logits `[T, V]`."""
    model, params = lm.model, jax.tree.map(lambda x: np.asarray(x, np.float64), lm.params)
    states = np.zeros((model.layers, model.heads, model.width, model.width))
    made = []
    for token in text:
        x = params["embed"][token]
        for S, p in zip(states, params["layers"], strict=True):
            y = x / np.sqrt(np.mean(x * x) + 1e-6)
            gates = 1 / (1 + np.exp(-(y @ p["gates"] + 1)))
            read = []
            for h in range(model.heads):
                own = slice(h * model.width, (h + 1) * model.width)
                q, k, v = ((y @ p[name])[own] for name in "qkv")
                q, k = q / np.linalg.norm(q), k / np.linalg.norm(k)
                S[h] = gates[h] * (S[h] - gates[model.heads + h] * np.outer(k, k @ S[h])) + gates[
                    model.heads + h] * np.outer(k, v)
                read.append(q @ S[h])
            x = x + np.concatenate(read) @ p["o"]
        made.append(x @ params["embed"].T)
    return np.array(made)


def test_a_recurrent_model_decodes_as_a_loop_over_its_whole_text(recurrent: Any) -> None:
    """Ragged prompts, in chunks and whole."""
    whole = tokens_of(recurrent, **POLICY)
    logits = score(recurrent.model, recurrent.params, texts(PROMPTS, whole))
    for i, (prompt, new) in enumerate(zip(PROMPTS, whole, strict=True)):
        want = loop(recurrent, prompt + new)
        np.testing.assert_allclose(logits[i, :len(want)], want, atol=1e-4)
        if not POLICY["temperature"][i]:
            assert want[len(prompt) - 1:-1].argmax(-1).tolist() == new
    assert len({tuple(row) for row in whole}) == len(PROMPTS)       # the texts differ
    assert tokens_of(recurrent, chunk=4, **POLICY) == whole


def test_a_recurrent_model_scores_each_path_of_a_tree_as_a_text(recurrent: Any) -> None:
    """In one window, beside dead nodes, and level by level in a scratch."""
    # the text 3 1 4, below it 1 and 5, below the 1 another 9 and 2, below the 5 a 6
    tokens, parent = [3, 1, 4, 1, 5, 9, 2, 6], [-1, 0, 1, 2, 2, 3, 3, 4]
    paths = [[0]]
    for i in range(1, 8):
        paths.append([*paths[parent[i]], i])
    mask = np.array([[j in paths[i] for j in range(8)] for i in range(8)])
    depth = jnp.array([[len(path) - 1 for path in paths]], jnp.int32)
    window = Window(tokens=jnp.array([tokens]), positions=depth, mask=jnp.asarray(mask)[None],
                    live=jnp.ones((1, 8), bool))
    want = np.stack([loop(recurrent, [tokens[j] for j in path])[-1] for path in paths])
    model, params = recurrent.model, recurrent.params
    np.testing.assert_allclose(score(model, params, window)[0], want, atol=1e-4)

    cache = model.init_cache(1, 32)
    _, entries = scored(model, params, chain(tokens[:3]), cache)
    cache = cache.commit(entries, jnp.arange(3)[None])
    scratch, found = cache.tree_buffer(entries, 5), []
    for first, level in ((3, [3, 4]), (5, [5, 6, 7])):
        part = Window(tokens=jnp.array([[tokens[i] for i in level]]), positions=depth[:, jnp.array(level)],
                      mask=jnp.eye(len(level), dtype=bool)[None], live=jnp.ones((1, len(level)), bool))
        logits, entries = scored(model, params, part, scratch.seen_by(jnp.asarray(mask[level][:, 3:])[None]))
        scratch = scratch.append(entries, part.positions, jnp.int32(first - 3))
        found.append(logits[0])
    np.testing.assert_allclose(np.concatenate(found), want[3:], atol=1e-4)
    # 4, then the path 5 6 was true: what follows is the loop's over 3 1 4 5 6 7
    after = scratch.commit(jnp.array([[-1, 3, -1, -1, 4]]))
    assert after.length.tolist() == [5]
    logits, _ = scored(model, params, causal(jnp.array([[7]]), jnp.array([5])), after)
    np.testing.assert_allclose(logits[0, 0], loop(recurrent, [3, 1, 4, 5, 6, 7])[-1], atol=1e-4)


@pytest.mark.full
def test_drafts_leave_the_tokens_of_a_recurrent_model_as_they_are(recurrent: Any) -> None:
    plain = tokens_of(recurrent, **POLICY)
    assert tokens_of(recurrent, algorithm=LOOKUP, **POLICY) == plain
    tree = dx.Speculative(dx.drafts.DraftModel(attention()), shape=TREE)
    assert tokens_of(recurrent, algorithm=tree, chunk=4, **POLICY) == plain


@pytest.mark.full
@pytest.mark.parametrize("shape", [pytest.param(dx.trees.Chain(3), marks=pytest.mark.full), TREE],
                         ids=["chain", "tree"])
def test_a_recurrent_model_drafts(recurrent: Any, shape: Any) -> None:
    """For another model; and what it drafts for itself is always right, so its states are."""
    alg = dx.Speculative(dx.drafts.DraftModel(recurrent), shape=shape)
    assert tokens_of(attention(), algorithm=alg, **POLICY) == tokens_of(attention(), **POLICY)
    out = dx.generate(recurrent, PROMPTS, max_new_tokens=NEW, algorithm=alg, **POLICY)
    assert out.tokens.tolist() == tokens_of(recurrent, **POLICY)
    assert out.stats.rounds.tolist() == [NEW // (shape.length + 1)] * len(PROMPTS)


def shapes_in(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shape of every array that a program makes, in loops and branches too."""
    for eqn in jaxpr.eqns:
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)
        yield from (var.aval.shape for var in eqn.outvars)


def test_a_prefill_holds_one_state_a_layer(recurrent: Any) -> None:
    model = recurrent.model
    state = (model.heads, model.width, model.width)

    def largest(is_prefill: bool) -> int:
        """The most states of a layer that any array of the program holds for a row."""
        def prefill(tokens: Any) -> Any:
            window = causal(tokens, jnp.zeros(2, jnp.int32)).replace(is_prefill=is_prefill)
            cache = model.init_cache(2, 512)
            out = model.apply(recurrent.params, window, cache)
            return cache.commit(out.entries, window.positions)

        found = list(shapes_in(jax.make_jaxpr(prefill)(jnp.zeros((2, 256), jnp.int32)).jaxpr))
        return max(int(np.prod(shape)) for shape in found if shape[-3:] == state) // (2 * int(np.prod(state)))

    assert largest(is_prefill=True) == 1
    assert largest(is_prefill=False) == 256          # as any other window: the claim above can fail


def test_what_needs_truncation_or_rewrites_is_refused_by_name(recurrent: Any) -> None:
    with pytest.raises(ValueError, match="model: got DeltaNet, takes a Transformer, whose layers run one by one"):
        dx.drafts.CLaSp(recurrent, skips=1)
    with pytest.raises(ValueError, match=r"cache: Speculative\(CLaSp\) needs one that supports truncation, which "
                                         "Recurrent does not"):
        tokens_of(recurrent, algorithm=dx.Speculative(dx.drafts.CLaSp(attention(), skips=1)))
    from decodax.algorithms.diffusion import Adapter, Blocks, DualCache, MaskedDiffusion
    from decodax.models import Diffusion

    fills = dataclasses.replace(recurrent, diffusion=Diffusion(mask=63))
    alg = MaskedDiffusion(Adapter(63), Blocks(4), caching=DualCache())
    with pytest.raises(ValueError, match=r"cache: MaskedDiffusion needs one that supports .*rewrites.*, which "
                                         "Recurrent does not"):
        tokens_of(fills, algorithm=alg)


# An encoder and a decoder


SOURCES = [[11, 12, 13, 14, 15, 16, 17, 18, 1], [21, 22, 1], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 1],
           [44, 1]]


def source(rows: list[list[int]], width: int = 16) -> EncoderText:
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[:len(ids)] = ids
    return EncoderText(tokens=tokens, length=np.array([len(row) for row in rows], np.int32))


@functools.cache
def t5(version: str) -> tuple[Any, Path]:
    """A tiny checkpoint of a version as transformers writes it, with more distances than buckets."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import tempfile

    newer = version == "1.1"
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu" if newer else "relu", tie_word_embeddings=not newer)
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    if newer:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
        model.shared.weight.mul_(3)
    directory = Path(tempfile.mkdtemp())
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def translators(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A T5 of transformers, and what this library loads from its directory."""
    reference, directory = t5(request.param)
    lm = dx.load(directory)
    assert isinstance(lm.model, T5)
    assert (lm.model.config.gated, lm.model.config.tied, lm.model.config.scaled) == (
        (False, True, True) if request.param == "1.0" else (True, False, False))
    return reference, lm


@pytest.fixture(scope="module")
def translator() -> Any:
    return dx.load(t5("1.0")[1])


def translated(lm: Any, rows: list[list[int]] = SOURCES, **options: Any) -> list[list[int]]:
    return tokens_of(lm, [[0]] * len(rows), inputs=source(rows), **{"eos_token_id": [], **options})


def test_t5_equals_transformers(translators: tuple[Any, Any]) -> None:
    """Logits of given texts and greedy tokens, of sources of different lengths."""
    import torch

    reference, lm = translators
    given = source(SOURCES)
    mask = torch.tensor(np.arange(16) < given.length[:, None]).long()
    text = np.random.default_rng(0).integers(2, VOCABULARY, (4, 20))
    text[:, 0] = 0
    ids = torch.tensor(given.tokens, dtype=torch.long)
    with torch.no_grad():
        want = reference(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor(text)).logits.numpy()
    got = score(lm.model, lm.params, causal(text, jnp.zeros(4, jnp.int32)), given)
    np.testing.assert_allclose(got, want, atol=2e-4)
    reference.generation_config.eos_token_id = None
    new = reference.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False).numpy()[:, 1:]
    assert translated(lm) == new.tolist()
    assert len({token for row in new.tolist() for token in row}) > 2        # not one token for ever


def test_every_row_has_its_own_inputs(translator: Any) -> None:
    """In samples of a prompt, and in batches."""
    alone = [translated(translator, [row], num_samples=2, temperature=1.0, request_ids=[i])
             for i, row in enumerate(SOURCES)]
    assert alone[0] != alone[1]
    for options in ({}, {"batch_size": 2}):
        together = translated(translator, num_samples=2, temperature=1.0, **options)
        assert together == [row for rows in alone for row in rows]


@pytest.mark.full
def test_drafts_leave_the_tokens_of_t5_as_they_are(translator: Any) -> None:
    plain = translated(translator, **POLICY)
    assert translated(translator, algorithm=LOOKUP, **POLICY) == plain
    tree = dx.Speculative(dx.drafts.DraftModel(attention()), shape=TREE)
    assert translated(translator, algorithm=tree, **POLICY) == plain


def test_t5_reads_positions_and_not_places(translator: Any) -> None:
    """Nodes of a tree in a scratch score as in a text of their own."""
    model, params, given = translator.model, translator.params, source(SOURCES[:1])
    cache = model.init_cache(1, 32, params=params, inputs=given)
    _, entries = scored(model, params, chain([0, 5, 6, 7, 8]), cache)
    cache = cache.commit(entries, jnp.arange(5)[None])
    scratch = cache.tree_buffer(entries, 3)
    # two nodes below the text, then one below the first of them
    level = Window(tokens=jnp.array([[9, 10]]), positions=jnp.array([[5, 5]]), mask=jnp.eye(2, dtype=bool)[None],
                   live=jnp.ones((1, 2), bool))
    above, entries = scored(model, params, level, scratch.seen_by(jnp.zeros((1, 2, 3), bool)))
    scratch = scratch.append(entries, level.positions, jnp.int32(0))
    below, _ = scored(model, params, causal(jnp.array([[11]]), jnp.array([6])),
                      scratch.seen_by(jnp.array([[[True, False, False]]])))
    whole = lambda text: score(model, params, chain(text), given)[0]
    np.testing.assert_allclose(above[0, 1], whole([0, 5, 6, 7, 8, 10, 0])[5], atol=1e-4)
    np.testing.assert_allclose(below[0, 0], whole([0, 5, 6, 7, 8, 9, 11])[6], atol=1e-4)


def test_a_bias_is_added_to_the_scores_of_cache_and_window(translator: Any) -> None:
    """Where slots are positions and where they are not, each head with tokens of its own."""
    c, r = translator.model.config, np.random.default_rng(0)
    B, S, W, H, d = 2, 6, 3, c.heads, c.head_dim
    bias = functools.partial(relative_bias, c, jnp.asarray(r.normal(size=(c.buckets, H)), jnp.float32), both=False)
    q, k, v = (r.normal(size=(B, W, H, d)).astype(np.float32) for _ in range(3))
    keys, values = (r.normal(size=(B, H, S, d)).astype(np.float32) for _ in range(2))
    positions = np.broadcast_to(S + np.arange(W, dtype=np.int32), (B, W))
    mask = np.tril(np.ones((1, W, W), bool))
    all_k, all_v = (np.concatenate([a, b.transpose(0, 2, 1, 3)], 2) for a, b in ((keys, k), (values, v)))
    added = np.asarray(bias(positions[:, None, :, None], np.arange(S + W)[None, None, None]))
    scores = np.einsum("bwhd,bhkd->bhwk", q, all_k) + added
    scores = np.where(np.arange(S + W) <= positions[:, None, :, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bhwk,bhkd->bwhd", weights / weights.sum(-1, keepdims=True), all_v)

    cache = np.concatenate([keys, values], -1)
    got = window_attention(q, k, v, mask, positions, cache, np.full(B, S), scale=1.0, bias=by_position(bias))
    np.testing.assert_allclose(got, want, atol=1e-5)
    # the same entries, shuffled in each head
    order = np.stack([np.stack([r.permutation(S) for _ in range(H)]) for _ in range(B)]).astype(np.int32)
    shuffled = np.take_along_axis(cache, order[..., None], 2)
    got = window_attention(q, k, v, mask, positions, shuffled, scale=1.0, slot_positions=order, bias=by_position(bias))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_t5_without_a_source_is_refused_by_name(translator: Any) -> None:
    with pytest.raises(ValueError, match="inputs: got none, a T5 takes an EncoderText"):
        tokens_of(translator, [[0]])
    with pytest.raises(ValueError, match="inputs: got a dict, a T5 takes an EncoderText"):
        tokens_of(translator, [[0]], inputs={"tokens": np.zeros((1, 4), np.int32)})
    with pytest.raises(ValueError, match=r"inputs.*: got shape \(4, 16\) for 2 prompts"):
        tokens_of(translator, [[0], [0]], inputs=source(SOURCES))


# A mixture of experts: logits and greedy tokens against transformers are tests of `tests/models/test_families.py`


@functools.cache
def mixture() -> Any:
    config = llama(vocab=VOCABULARY, width=16, layers=2, heads=4, kv_heads=2, mlp=24)
    layer = dataclasses.replace(config.layers[0], experts=Experts(count=6, chosen=2, width=12))
    network = Transformer(dataclasses.replace(config, layers=(config.layers[0], layer)))
    weights = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, network.init_params(jax.random.key(2)))
    return dx.LM(model=network, params=weights, vocab_size=VOCABULARY)


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts_for_every_token() -> None:
    """However many choose the same one: here all of them choose the first."""
    E, D, width, n = 5, 8, 6, 37
    e = Experts(count=E, chosen=2, width=width)
    keys = jax.random.split(jax.random.key(0), 5)
    gate, up = (jax.random.normal(key, (E, D, width)) for key in keys[:2])
    down, x = jax.random.normal(keys[2], (E, width, D)), jax.random.normal(keys[3], (n, D))
    logits = jax.random.normal(keys[4], (n, E)).at[:, 0].set(5.0)
    which, weights = route(logits, e)
    got = jax.jit(lambda *a: mix(*a, ACTIVATIONS["silu"]))(x, which, weights, gate, up, down)
    every = np.stack([(np.asarray(jax.nn.silu(x @ gate[i])) * (x @ up[i])) @ down[i] for i in range(E)], 1)
    p = np.exp(np.asarray(logits))
    for row in range(n):
        best = np.argsort(-p[row], kind="stable")[:2]
        want = (p[row, best] / p[row, best].sum()) @ every[row, best]
        np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=2e-5)


def test_a_token_is_computed_to_the_same_bits_in_any_company() -> None:
    e = Experts(count=6, chosen=3, width=24)
    keys = jax.random.split(jax.random.key(0), 6)
    gate, up = (jax.random.normal(key, (6, 32, 24)) for key in keys[:2])
    down, router = jax.random.normal(keys[2], (6, 24, 32)), jax.random.normal(keys[3], (32, 6))
    run = jax.jit(lambda x, logits: mix(x, *route(logits, e), gate, up, down, jax.nn.silu))
    x, others = jax.random.normal(keys[4], (50, 32)), jax.random.normal(keys[5], (50, 32))
    logits = x @ router
    whole = np.asarray(run(x, logits))
    for i in range(0, 50, 7):
        np.testing.assert_array_equal(run(x[i:i + 1], logits[i:i + 1])[0], whole[i])
    back = slice(None, None, -1)
    np.testing.assert_array_equal(run(x[back], logits[back])[back], whole)
    company = run(others.at[11].set(x[11]), (others @ router).at[11].set(logits[11]))
    np.testing.assert_array_equal(company[11], whole[11])


def test_a_row_of_a_mixture_does_not_see_its_batch_mates() -> None:
    r = np.random.default_rng(0)
    text = r.integers(0, VOCABULARY, (4, 12))
    other = text.copy()
    other[1:] = r.integers(0, VOCABULARY, (3, 12))
    start = jnp.zeros(4, jnp.int32)
    one, two = (np.asarray(score(mixture().model, mixture().params, causal(ids, start))) for ids in (text, other))
    np.testing.assert_array_equal(one[0], two[0])
    assert (one[1:] != two[1:]).any()


def test_a_mixture_decodes_as_it_scores() -> None:
    lm = mixture()
    plain = tokens_of(lm, **POLICY)
    assert tokens_of(lm, algorithm=LOOKUP, **POLICY) == plain
    logits = score(lm.model, lm.params, texts(PROMPTS, plain))
    for i in (0, 1):        # the greedy ones
        first = len(PROMPTS[i]) - 1
        assert logits[i, first:first + NEW].argmax(-1).tolist() == plain[i]


def test_a_mixture_can_be_trained() -> None:
    def loss(params: Any) -> jax.Array:
        return mixture().model.forward(params, jnp.array(PROMPTS[:1]))[..., 3].sum()

    found = jax.jit(jax.grad(loss))(mixture().params)["layers"]["1"]["mlp"]
    for part in ("router", "gate", "up", "down"):
        assert np.abs(found[part]["kernel"]).sum() > 0


# Soft prompts


SOFT = [[5, 9, 2, 6, 5, 3], [8, 9, 7]]


def embeddings(values: list[np.ndarray]) -> Embeddings:
    """Embeddings at the first places of each row, of different numbers."""
    most = max(map(len, values))
    padded = np.stack([np.pad(np.asarray(row, np.float32), ((0, most - len(row)), (0, 0))) for row in values])
    return Embeddings(values=padded, given=np.arange(most) < np.array([[len(row)] for row in values]))


@pytest.mark.full
def test_the_models_own_embeddings_give_the_results_of_their_ids() -> None:
    """In samples, batches, prompt chunks, behind drafts and in trees."""
    lm = attention()
    soft = embeddings([np.asarray(lm.params["embed"])[row] for row in SOFT])
    ids = [[*row, *PROMPTS[0][:4 + i]] for i, row in enumerate(SOFT)]
    blank = [[63] * len(row) + PROMPTS[0][:4 + i] for i, row in enumerate(SOFT)]
    tree = dx.Speculative(dx.drafts.DraftModel(lm), shape=TREE)
    policy: dict[str, Any] = dict(temperature=[0.0, 1.0], seed=3, num_samples=2)
    want = tokens_of(lm, ids, **policy)
    assert tokens_of(lm, blank, **policy) != want
    more: dict[str, Any]
    for more in ({"batch_size": 1}, {"algorithm": LOOKUP, "chunk": 2}, {"algorithm": tree}, {}):
        assert tokens_of(lm, blank, inputs=soft, **policy, **more) == want
    # a prompt may be soft to its end
    whole = [row[:len(values)] for row, values in zip(blank, SOFT, strict=True)]
    assert tokens_of(lm, whole, inputs=soft, **policy) == tokens_of(lm, SOFT, **policy)


@pytest.mark.parametrize("alg", [None, pytest.param(LOOKUP, marks=pytest.mark.full)], ids=["plain", "lookup"])
def test_a_soft_prompt_equals_transformers_inputs_embeds(tmp_path: Path, alg: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.models.tiny import saved

    reference = saved("llama", tmp_path)
    reference.generation_config.eos_token_id = None
    lm = dx.load(tmp_path)
    r = np.random.default_rng(0)
    soft, ids = [r.normal(0, 0.4, (n, 32)).astype(np.float32) for n in (5, 2)], [[4, 5, 6], [7]]
    want = []
    for values, own in zip(soft, ids, strict=True):
        rest = reference.get_input_embeddings()(torch.tensor([own]))
        whole = torch.cat([torch.tensor(values)[None], rest], 1)
        want.append(reference.generate(inputs_embeds=whole, attention_mask=torch.ones(whole.shape[:2]).long(),
                                       max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist())
    prompts = [[0] * len(values) + own for values, own in zip(soft, ids, strict=True)]
    assert tokens_of(lm, prompts, inputs=embeddings(soft), algorithm=alg, eos_token_id=[]) == want
    assert tokens_of(lm, prompts, eos_token_id=[]) != want


def test_inputs_that_a_model_does_not_take_are_refused_by_name(recurrent: Any) -> None:
    soft = Embeddings(values=np.zeros((2, 3, 16), np.float32), given=np.ones((2, 3), bool))
    with pytest.raises(ValueError, match="inputs: DeltaNet takes none"):
        tokens_of(recurrent, PROMPTS[:2], inputs=soft)
    with pytest.raises(ValueError, match="inputs: got an array, a Transformer takes Embeddings"):
        tokens_of(attention(), PROMPTS[:2], inputs=soft.values)
    wide = soft.replace(values=np.zeros((2, 3, 8), np.float32))
    with pytest.raises(ValueError, match=r"inputs: got embeddings of width 8, takes 16"):
        tokens_of(attention(), PROMPTS[:2], inputs=wide)
