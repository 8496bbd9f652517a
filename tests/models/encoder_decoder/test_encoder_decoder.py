"""Encoder-decoders against transformers: T5, BART, mBART, M2M-100 and NLLB, Marian."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import decodax as dx
from decodax.core.window import Window, causal
from decodax.io.files import CheckpointError
from decodax.models import EncoderAudio, EncoderDecoder, EncoderText
from decodax.models.encoder_decoder.positions import relative_bias
from decodax.pallas_kernels.window_attention import by_position, window_attention
from tests.matrix import often
from tests.models.encoder_decoder.tiny import AS_RELEASED, CASES, SOURCES, VOCABULARY, loaded, padded, saved, source
from tests.models.encoder_decoder.tiny import texts as without_start
from tests.models.small import NEW, POLICY, attention, chain, score, scored, tokens_of

LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))
TREE = dx.trees.Fixed.balanced(2, 2)


def start(name: str) -> int:
    return loaded(name).start


def generated(name: str, rows: list[list[int]] = SOURCES, **options: Any) -> list[list[int]]:
    pad = CASES[name][1].get("pad_token_id", 0)
    return tokens_of(loaded(name), [[]] * len(rows), inputs=source(rows), **{
        "algorithm": dx.Autoregressive(), "forced_bos_token_id": -1, "forced_eos_token_id": [],
        "no_repeat_ngram_size": 1, "min_length": 0, "bad_words_ids": None, "suppress_tokens": [pad], **options})


@pytest.mark.wide(but=("nllb",))
@pytest.mark.parametrize("case", often([name for name in CASES if name not in ("mt5", "untied")], CASES))
def test_logits_equal_transformers(case: str) -> None:
    """The logits of given texts, after sources of different lengths, are compared."""
    reference, lm = saved(case)[0], loaded(case)
    assert isinstance(lm.model, EncoderDecoder) and lm.vocab_size == lm.model.config.vocab
    text = np.random.default_rng(0).integers(3, lm.vocab_size - 1, (4, 20))
    text[:, 0] = start(case)
    pad = CASES[case][1].get("pad_token_id", 0)
    text[text == pad] = 5
    text[:, 0] = start(case)
    with torch.no_grad():
        want = reference(**padded(SOURCES, pad), decoder_input_ids=torch.tensor(text)).logits.numpy()
    got = score(lm.model, lm.params, causal(text, jnp.zeros(4, jnp.int32)), source())
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("case", often(["t5-1.0", "nllb", "marian"], CASES))
def test_greedy_tokens_equal_transformers(case: str) -> None:
    """Each token once, since tiny random models repeat themselves."""
    reference = saved(case)[0]
    pad = CASES[case][1].get("pad_token_id", 0)
    config = dict(max_new_tokens=NEW, do_sample=False, suppress_tokens=[pad], num_beams=1, early_stopping=False,
                  length_penalty=1.0)
    off = dict(eos_token_id=None, forced_bos_token_id=None, forced_eos_token_id=None, no_repeat_ngram_size=1,
               min_length=0, bad_words_ids=None)
    own = {key: getattr(reference.generation_config, key) for key in off}
    try:
        for key, value in off.items():
            setattr(reference.generation_config, key, value)
        want = reference.generate(**padded(SOURCES, pad), **config).numpy()[:, 1:].tolist()
    finally:
        for key, value in own.items():
            setattr(reference.generation_config, key, value)
    assert generated(case) == want


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["bart", "nllb"], AS_RELEASED))
def test_beams_of_the_generation_config_equal_transformers(name: str) -> None:
    """The config has beams, forced tokens, a length penalty and banned n-grams; the prompt is the start token."""
    reference, lm = saved(name)[0], loaded(name)
    pad = CASES[name][1]["pad_token_id"]
    want = without_start(reference.generate(**padded(SOURCES, pad)).numpy())
    out = dx.generate(lm, [[]] * 4, inputs=source())
    got = [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]
    assert got == want
    assert len(set(map(tuple, want))) > 2


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["bart"], CASES))
def test_every_row_has_its_own_inputs(name: str) -> None:
    """In samples of a prompt, and in batches."""
    policy: dict[str, Any] = dict(num_samples=2, temperature=1.0)
    alone = [generated(name, [row], request_ids=[i], **policy) for i, row in enumerate(SOURCES)]
    assert alone[0] != alone[1]
    for options in ({}, {"batch_size": 2}):
        assert generated(name, **policy, **options) == [row for rows in alone for row in rows]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_drafts_leave_the_tokens_as_they_are(case: str) -> None:
    plain = generated(case, **POLICY)
    assert generated(case, algorithm=LOOKUP, **POLICY) == plain
    tree = dx.Speculative(dx.drafts.DraftModel(attention(loaded(case).vocab_size)), shape=TREE)
    assert generated(case, algorithm=tree, **POLICY) == plain


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["nllb"], CASES))
def test_a_chain_of_drafts_and_a_chunked_prefill_leave_the_tokens_as_they_are(name: str) -> None:
    own = dict(zip("abcd", np.random.default_rng(1).integers(3, 50, (4, 7)).tolist(), strict=True))
    prompts = [[start(name), *row[:n]] for row, n in zip(own.values(), (7, 3, 5, 1), strict=True)]
    run = functools.partial(tokens_of, loaded(name), prompts, inputs=source(), forced_eos_token_id=[],
                            forced_bos_token_id=-1, **POLICY)
    plain = run(algorithm=dx.Autoregressive())
    assert run(algorithm=LOOKUP, chunk=2) == plain
    assert run(algorithm=dx.Autoregressive(), num_samples=2)[::2] == plain


@pytest.mark.full
def test_beams_with_drafts_equal_beams() -> None:
    options = dict(inputs=source(), eos_token_id=2)
    lookup = dx.algorithms.beam_search(3, draft=dx.drafts.PromptLookup(length=4))
    plain = tokens_of(loaded("nllb"), [[]] * 4, algorithm=dx.algorithms.beam_search(3), **options)
    assert tokens_of(loaded("nllb"), [[]] * 4, algorithm=lookup, **options) == plain


def test_sources_of_similar_lengths_share_their_programs() -> None:
    """The sources have 3 to 16 tokens."""
    assert EncoderText.of(SOURCES).tokens.shape == EncoderText.of(SOURCES[:1] + [[5] * 16] * 3).tokens.shape == (4, 16)
    assert [EncoderText.of([[5] * n]).tokens.shape[1] for n in (1, 17, 128, 129, 1000)] == [16, 32, 128, 256, 1024]
    with pytest.raises(ValueError, match="rows: got a text without tokens"):
        EncoderText.of([[4], []])


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["t5-1.0"], CASES))
def test_nodes_are_placed_by_position(name: str) -> None:
    """Nodes of a tree buffer score as in a text of their own."""
    lm, given = loaded(name), source(SOURCES[:1])
    model, params = lm.model, lm.params
    cache = model.init_cache(1, 32, params=params, inputs=given)
    _, entries = scored(model, params, chain([0, 5, 6, 7, 8]), cache)
    cache = cache.commit(entries, jnp.arange(5)[None])
    buffer = cache.tree_buffer(entries, 3)
    # two nodes below the text, then one below the first of them
    level = Window(tokens=jnp.array([[9, 10]]), positions=jnp.array([[5, 5]]), mask=jnp.eye(2, dtype=bool)[None],
                   live=jnp.ones((1, 2), bool))
    above, entries = scored(model, params, level, buffer.seen_by(jnp.zeros((1, 2, 3), bool)))
    buffer = buffer.append(entries, level.positions, jnp.int32(0))
    below, _ = scored(model, params, causal(jnp.array([[11]]), jnp.array([6])),
                      buffer.seen_by(jnp.array([[[True, False, False]]])))
    whole = lambda text: score(model, params, chain(text), given)[0]
    np.testing.assert_allclose(above[0, 1], whole([0, 5, 6, 7, 8, 10, 0])[5], atol=1e-4)
    np.testing.assert_allclose(below[0, 0], whole([0, 5, 6, 7, 8, 9, 11])[6], atol=1e-4)


@pytest.mark.wide
def test_a_bias_is_added_to_the_scores_of_cache_and_window() -> None:
    """This holds for caches whose slots are positions, and for those in which each head keeps other tokens."""
    stack, r = loaded("t5-1.0").model.config.decoder, np.random.default_rng(0)
    B, S, W, H, d = 2, 6, 3, stack.heads, stack.head_dim
    weights = jnp.asarray(r.normal(size=(stack.positions.buckets, H)), jnp.float32)
    bias = functools.partial(relative_bias, stack.positions, weights, both=False)
    q, k, v = (r.normal(size=(B, W, H, d)).astype(np.float32) for _ in range(3))
    keys, values = (r.normal(size=(B, H, S, d)).astype(np.float32) for _ in range(2))
    positions = np.broadcast_to(S + np.arange(W, dtype=np.int32), (B, W))
    mask = np.tril(np.ones((1, W, W), bool))
    all_k, all_v = (np.concatenate([a, b.transpose(0, 2, 1, 3)], 2) for a, b in ((keys, k), (values, v)))
    added = np.asarray(bias(positions[:, None, :, None], np.arange(S + W)[None, None, None]))
    scores = np.einsum("bwhd,bhkd->bhwk", q, all_k) + added
    scores = np.where(np.arange(S + W) <= positions[:, None, :, None], scores, -np.inf)
    softmax = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bhwk,bhkd->bwhd", softmax / softmax.sum(-1, keepdims=True), all_v)

    cache = np.concatenate([keys, values], -1)
    got = window_attention(q, k, v, mask, positions, cache, np.full(B, S), scale=1.0, bias=by_position(bias))
    np.testing.assert_allclose(got, want, atol=1e-5)
    # the same entries, shuffled in each head
    order = np.stack([np.stack([r.permutation(S) for _ in range(H)]) for _ in range(B)]).astype(np.int32)
    shuffled = np.take_along_axis(cache, order[..., None], 2)
    got = window_attention(q, k, v, mask, positions, shuffled, scale=1.0, slot_positions=order, bias=by_position(bias))
    np.testing.assert_allclose(got, want, atol=1e-5)


# Files


@pytest.mark.wide
def test_versions_of_t5_are_recognised() -> None:
    """Whether the MLP is gated, the head is tied, and hidden states are scaled before it."""
    configs = [loaded(name).model.config for name in ("t5-1.0", "t5-1.1", "mt5")]
    assert [(c.gated, c.tied, c.head_scale != 1) for c in configs] == [
        (False, True, True), (True, False, False), (True, True, False)]


def copied(name: str, to: Path, tensors: Any = None, **entries: Any) -> Path:
    """A copy of a saved model with other tensors or entries of its config.json."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(saved(name)[1], to)
    if tensors is not None:
        save_file(tensors(load_file(to / "model.safetensors")), to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **entries}))
    return to


def test_older_files_hold_copies_and_lack_a_bias(tmp_path: Path) -> None:
    """And those of a bare model have no prefix."""
    def older(tensors: dict[str, Any]) -> dict[str, Any]:
        found = {name.removeprefix("model."): x for name, x in tensors.items() if name != "final_logits_bias"}
        table = found["shared.weight"]
        return {**found, "encoder.embed_tokens.weight": table.clone(), "decoder.embed_tokens.weight": table.clone(),
                "encoder.version": torch.ones(1)}

    lm = dx.load(copied("bart", tmp_path / "older", older))
    assert lm.model == EncoderDecoder(dataclasses.replace(loaded("bart").model.config, logits_bias=False))
    for path, weights in lm.params.items():
        jax.tree.map(np.testing.assert_array_equal, weights, loaded("bart").params[path])


def test_files_that_describe_another_model_are_refused(tmp_path: Path) -> None:
    other = lambda tensors: {**tensors, "lm_head.weight": tensors["model.shared.weight"] + 1}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from shared\.weight"):
        dx.load(copied("bart", tmp_path / "head", other))
    with pytest.raises(CheckpointError, match="normalize_before: got True, which a bart model does not have here"):
        dx.load(copied("bart", tmp_path / "norms", normalize_before=True))
    with pytest.raises(CheckpointError, match="encoder_attention_heads: got 5, which does not divide d_model = 24"):
        dx.load(copied("bart", tmp_path / "heads", encoder_attention_heads=5))
    with pytest.raises(CheckpointError, match="encoder_layers: got 0, takes a whole number"):
        dx.load(copied("bart", tmp_path / "layers", encoder_layers=0))
    with pytest.raises(ValueError, match=r"context: got one for .*, takes None: an encoder-decoder has no context len"):
        dx.load(saved("bart")[1], context=64)


def test_older_directories_have_their_generation_config_in_config_json(tmp_path: Path) -> None:
    root = copied("bart", tmp_path / "older", num_beams=3, length_penalty=2.0, forced_bos_token_id=0)
    (root / "generation_config.json").unlink()
    config = dx.load(root).generation_config
    assert (config["num_beams"], config["length_penalty"], config["decoder_start_token_id"]) == (3, 2.0, 2)


def test_a_marian_directory_takes_ids(tmp_path: Path) -> None:
    root = copied("marian", tmp_path / "marian")
    (root / "source.spm").write_text("")
    (root / "vocab.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"has vocab\.json and no tokenizer\.json, so the model takes and gives token"):
        lm = dx.load(root)
    with pytest.raises(ValueError, match="has no tokenizer that is read here; takes token ids"):
        EncoderText.read(lm, ["text"])


# Errors


def test_inputs_are_checked() -> None:
    lm = loaded("bart")
    with pytest.raises(ValueError, match="inputs: got none, an encoder-decoder takes an EncoderText"):
        tokens_of(lm, [[2]])
    with pytest.raises(ValueError, match="inputs: got a dict, an encoder-decoder takes an EncoderText"):
        tokens_of(lm, [[2]], inputs={"tokens": np.zeros((1, 4), np.int32)})
    with pytest.raises(ValueError, match="inputs: got a EncoderAudio, an encoder-decoder takes an EncoderText"):
        tokens_of(lm, [[2]], inputs=EncoderAudio(features=jnp.zeros((1, 8, 6))))
    with pytest.raises(ValueError, match=r"inputs.*: got shape \(4, 16\) for 2 prompts"):
        tokens_of(lm, [[2], [2]], inputs=source())
    with pytest.raises(ValueError, match="inputs: got texts of 64 tokens, padding included, the encoder has 48"):
        tokens_of(lm, [[2]], inputs=EncoderText.of([[5] * 40]))
    with pytest.raises(ValueError, match="max_new_tokens: prompt and new tokens are 61, the model has 48 positions"):
        tokens_of(lm, [[2]], inputs=EncoderText.of([[5]]), max_new_tokens=60)


# Text


@functools.cache
def translator() -> Any:
    """The tiny NLLB with a tokenizer that writes the language before a text and the end after it."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    from decodax.io.text import Tokenizer

    words = ["<s>", "<pad>", "</s>", "<unk>", *[f"w{i}" for i in range(4, 58)], "eng_Latn", "fra_Latn", "deu_Latn",
             "zul_Latn", "yor_Latn", "<mask>"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([w for w in words if w[0] == "<" or w.endswith("_Latn")])
    backend.post_processor = TemplateProcessing(single="eng_Latn $A </s>", special_tokens=[("eng_Latn", 58),
                                                                                           ("</s>", 2)])
    tokenizer = Tokenizer(backend, bos_id=0, eos_ids=(2,), pad_id=1, special_tokens={
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"})
    return dataclasses.replace(loaded("nllb"), tokenizer=tokenizer)


def test_sources_are_texts_with_their_language() -> None:
    lm = translator()
    read = EncoderText.read(lm, ["w11 w12", "w20"], language=["fra_Latn", "eng_Latn"])
    assert [row[:n].tolist() for row, n in zip(read.tokens, read.length, strict=True)] == [[59, 11, 12, 2], [58, 20, 2]]
    with pytest.raises(ValueError, match="language: got 'xyz', which is no token"):
        EncoderText.read(lm, "w11", language="xyz")


@pytest.mark.wide
def test_a_text_for_the_decoder_begins_with_its_start_token() -> None:
    lm = translator()
    run = functools.partial(tokens_of, lm, inputs=EncoderText.read(lm, "w11 w12"),
                            algorithm=dx.Autoregressive())
    assert run("") == run([[2]])
    assert run("deu_Latn w5") == run([[2, 60, 5]]) == run("</s> deu_Latn w5")
    out = dx.generate(lm, "", inputs=EncoderText.read(lm, "w11 w12"), max_new_tokens=4,
                      forced_bos_token_id=lm.tokenizer.backend.token_to_id("deu_Latn"))
    assert out.tokens[0, 0] == 60 and VOCABULARY == lm.vocab_size
