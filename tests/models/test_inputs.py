"""T5, an encoder with a decoder, and soft prompts: models that read more than the ids of a prompt."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import Window, causal
from decodax.models import T5, Embeddings, EncoderText
from decodax.models.t5 import relative_bias
from decodax.pallas_kernels.window_attention import by_position, window_attention
from tests.models.small import NEW, POLICY, PROMPTS, attention, chain, score, scored, tokens_of

pytestmark = pytest.mark.wide

VOCABULARY = 64
LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))
TREE = dx.trees.Fixed.balanced(2, 2)

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

    newer, multilingual = version == "1.1", version == "mt5"
    config = (transformers.MT5Config if multilingual else transformers.T5Config)(
        vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu" if newer or multilingual else "relu", tie_word_embeddings=not newer)
    torch.manual_seed(0)
    kind = transformers.MT5ForConditionalGeneration if multilingual else transformers.T5ForConditionalGeneration
    model = kind(config).eval()
    if newer:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
        model.shared.weight.mul_(3)
    directory = Path(tempfile.mkdtemp())
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module", params=["1.0", "1.1", pytest.param("mt5", marks=pytest.mark.wide)])
def translators(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A T5 of transformers, and what this library loads from its directory."""
    reference, directory = t5(request.param)
    lm = dx.load(directory)
    assert isinstance(lm.model, T5)
    assert (lm.model.config.gated, lm.model.config.tied, lm.model.config.scaled) == (
        {"1.0": (False, True, True), "1.1": (True, False, False), "mt5": (True, True, False)}[request.param])
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


def test_inputs_that_a_model_does_not_take_are_refused_by_name() -> None:
    soft = Embeddings(values=np.zeros((2, 3, 16), np.float32), given=np.ones((2, 3), bool))
    with pytest.raises(ValueError, match="inputs: got an array, takes Embeddings or AdapterRows"):
        tokens_of(attention(), PROMPTS[:2], inputs=soft.values)
    wide = soft.replace(values=np.zeros((2, 3, 8), np.float32))
    with pytest.raises(ValueError, match=r"inputs: got embeddings of width 8, takes 16"):
        tokens_of(attention(), PROMPTS[:2], inputs=wide)
