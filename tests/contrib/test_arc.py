"""ARC-Encoder (Pilchen et al., 2025): texts as vectors in front of a decoder."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import decodax as dx
from decodax.contrib import arc
from decodax.contrib.arc import CompressedContext
from decodax.io.load import LM
from decodax.models import ArcEncoder, Transformer, llama
from decodax.models.arc_encoder import runs
from tests.small_models import random_lm

# expected numbers are what kyutai-labs/ARC-Encoder (3e04c97) gives for the same weights and ids, in float32 on a CPU
# with plain attention in place of xformers'
EXPECTED = json.loads((Path(__file__).parent / "arc_encoder.json").read_text())
SIZES = dict(dim=16, n_layers=3, head_dim=8, hidden_dim=24, n_heads=4, n_kv_heads=2, norm_eps=1e-5, vocab_size=32,
             rope_theta=10000.0)
ARGS = dict(n_truncated_layers=1, compress_rates=[-4], rec_tok=True, cont_tok=True, memory_tokens=0,
            pooling_module={"pool_type": "mean_pooled_queries", "where": "before"}, causal_embedder=False)
BRIDGE = dict(bridge_type="mlp", in_dim=16, hidden_dim=10, out_dim=12)
LENGTHS = (11, 8, 3, 13, 1)
TEXTS = [np.random.default_rng(100 + i).integers(0, 32, n).tolist() for i, n in enumerate(LENGTHS)]


def tensors() -> dict[str, np.ndarray]:
    """Any numbers, by the names and shapes of the authors' files."""
    drawn = {}
    for i, (name, shape) in enumerate(sorted(EXPECTED["shapes"].items())):
        spread = 0.3 if len(shape) > 1 else 0.1
        drawn[name] = np.random.default_rng(i).normal("norm" in name, spread, shape).astype(np.float32)
    return drawn


@pytest.fixture
def released(tmp_path: Path) -> Path:
    config = dict(model_args=SIZES, embedder_args=ARGS, bridge_args=BRIDGE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def decoder() -> LM:
    return random_lm(Transformer(llama(vocab=20, width=12, layers=2, heads=3, mlp=16, context=128)))


def test_vectors_are_those_of_the_authors_code(released: Path) -> None:
    found = arc.load(released, decoder=1)
    for end, wanted in (("cont", EXPECTED["vectors"][::2]), ("rec", EXPECTED["vectors"][1::2])):
        for own, want in zip(found.vectors(TEXTS, end=end), wanted, strict=True):     # type: ignore[arg-type]
            np.testing.assert_allclose(own, want, atol=2e-5)
    assert np.abs(found.vectors(TEXTS)[0][-1] - found.vectors(TEXTS, end="rec")[0][-1]).max() > 0.1


@pytest.mark.parametrize("length", range(1, 30))
def test_runs_are_those_of_the_authors_code(length: int) -> None:
    shares, counts = runs(jnp.array([length]), 32, 4)
    sizes = [round(1 / float(row[row > 0].mean())) for row in np.asarray(shares[0, :int(counts[0])])]
    assert sizes == EXPECTED["runs"][length - 1]
    np.testing.assert_allclose(shares[0].sum(), counts[0], rtol=1e-5)
    assert not np.asarray(shares)[0, :, length:].any() and not np.asarray(shares)[0, int(counts[0]):].any()


def test_a_checkpoint_of_their_training_is_read_with_its_backbone(released: Path, tmp_path: Path) -> None:
    weights, trained, backbone = tensors(), tmp_path / "trained", tmp_path / "backbone"
    for folder in (trained / "embedder", trained / "bridge_module", backbone):
        folder.mkdir(parents=True)
    part = lambda head: {name.removeprefix(head): x for name, x in weights.items() if name.startswith(head)}
    frozen = ("layers.0", "tok_embeddings")         # not trained, so the backbone's file alone has them
    own = part("embedder.")
    save_file({name: x for name, x in own.items() if not name.startswith(frozen)},
              trained / "embedder/consolidated.safetensors")
    save_file({name: x for name, x in own.items() if name.startswith(frozen)}, backbone / "consolidated.safetensors")
    save_file(part("bridge_module."), trained / "bridge_module/consolidated.safetensors")
    (trained / "params.json").write_text(json.dumps(dict(embedder_params=ARGS, bridge_module=BRIDGE)))
    # as Llama's files have it, whose inner width is worked out: 8 / 3 of the width, times a factor, rounded up
    sizes = {k: v for k, v in SIZES.items() if k not in ("hidden_dim", "head_dim")}
    (backbone / "params.json").write_text(json.dumps(dict(sizes, multiple_of=8, ffn_dim_multiplier=0.5, n_heads=2)))
    with pytest.raises(ValueError, match=r"tensor embedder.*: got shape"):
        arc.load(trained, backbone=backbone)
    (backbone / "params.json").write_text(json.dumps(dict(sizes, multiple_of=8, ffn_dim_multiplier=0.5, head_dim=8)))
    one, other = arc.load(released), arc.load(trained, backbone=backbone)
    assert one.model == other.model
    assert all(map(np.array_equal, one.vectors(TEXTS), other.vectors(TEXTS)))
    with pytest.raises(ValueError, match="backbone: got none"):
        arc.load(trained)


@pytest.mark.wide
def test_a_saved_model_is_loaded(released: Path, tmp_path: Path) -> None:
    one = arc.load(released, decoder=1)
    one.save(tmp_path / "own")
    other = arc.load(tmp_path / "own")
    # the layers that do not run are not written
    assert other.model == one.model
    assert all(map(np.array_equal, one.vectors(TEXTS), other.vectors(TEXTS)))
    linear = ArcEncoder(one.model.config, out=12, pool=2, hidden=None, ends=("rec",))
    rms = dataclasses.replace(linear, hidden=5, normed=True)
    for i, model in enumerate((linear, rms)):
        fresh = arc.Encoder(model, model.init_params(jax.random.key(i)))
        fresh.save(tmp_path / f"{i}")
        again = arc.load(tmp_path / f"{i}")
        assert again.model == model
        assert all(map(np.array_equal, fresh.vectors(TEXTS, end="rec"), again.vectors(TEXTS, end="rec")))


def test_a_text_does_not_depend_on_its_batch(released: Path) -> None:
    found = arc.load(released)
    for text, own in zip(TEXTS, found.vectors(TEXTS), strict=True):
        np.testing.assert_allclose(found.vectors([text])[0], own, rtol=1e-5, atol=1e-5)
    # in pieces, whose vectors stand side by side with one end
    pieces = [found.vectors([TEXTS[0][i:i + 4]], end=None)[0] for i in (0, 4, 8)]
    chunked = found.vectors([TEXTS[0]], chunk=4)[0]
    np.testing.assert_allclose(chunked[:-1], np.concatenate(pieces), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(chunked[-1], found.vectors([TEXTS[0]])[0][-1], rtol=1e-5, atol=1e-5)


@pytest.mark.wide
def test_the_decoder_reads_vectors_at_the_place_of_the_context(released: Path) -> None:
    """Greedy tokens are those of a forward over embeddings; with drafts and a cache policy the same, row for row."""
    lm, found = decoder(), arc.load(released)
    rows: list[list[Any]] = [[CompressedContext(TEXTS[0]), [3, 4]], [
        [7], CompressedContext(TEXTS[2]), [1], CompressedContext(TEXTS[4]), [5, 6]], [[2, 9, 2]]]
    read = found.read(lm, rows)
    plain = dx.generate(lm, **read, max_new_tokens=9).tokens
    vectors = [iter(found.vectors([part.text for part in row if isinstance(part, CompressedContext)])) for row in rows
               if any(isinstance(part, CompressedContext) for part in row)]
    table = np.asarray(lm.params["embed"])
    for i, row in enumerate(rows):
        front = np.concatenate([next(vectors[i]) if isinstance(part, CompressedContext) else table[part]
                                for part in row])
        whole = np.concatenate([front, table[plain[i]]])
        given = dx.models.Embeddings(jnp.asarray(whole)[None], jnp.ones((1, len(whole)), bool))
        hidden, head = lm.model.features(lm.params, jnp.zeros((1, len(whole)), jnp.int32), inputs=given)
        assert np.asarray(head(hidden))[0, len(front) - 1:-1].argmax(-1).tolist() == plain[i].tolist()
    alone = dx.generate(lm, **found.read(lm, rows[1:2]), max_new_tokens=9).tokens
    assert alone[0].tolist() == plain[1].tolist()
    # a budget of everything is dense
    drafted = dx.generate(lm, **read, max_new_tokens=9, algorithm="prompt-lookup", cache="snapkv:budget=64", chunk=4)
    assert drafted.tokens.tolist() == plain.tolist()


@pytest.mark.wide
def test_an_encoder_begins_as_a_model_and_learns(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    assert optax
    lm = decoder()
    encoder = arc.begin(lm, pool=2, hidden=16)
    # reordered heads give the attention of the model, so what comes out of two layers without a bridge is alike
    assert encoder.model.config.layers[0].rope.interleaved and not lm.model.config.layers[0].rope.interleaved  # type: ignore
    texts = [np.resize(np.random.default_rng(i).integers(0, 20, 5), 24).tolist() for i in range(4)]
    tokens = jnp.asarray(texts)
    cost = lambda e, on: float(arc.loss(e.model, lm.model, e.params, lm.params, tokens, on))     # type: ignore[arg-type]
    after = arc.fit(encoder, lm, texts, size=12, steps=40, batch=4, rate=1e-3, bridge_rate=1e-2, warmup=4)
    assert cost(after, True) < cost(encoder, True) - 0.1
    assert not np.array_equal(after.params["cont"], encoder.params["cont"])
    assert not np.array_equal(after.params["rec"], encoder.params["rec"])
    again = arc.fit(encoder, lm, texts, size=12, steps=40, batch=4, rate=1e-3, bridge_rate=1e-2, warmup=4)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, after.params))


@pytest.mark.wide
def test_heads_are_reordered_and_not_changed() -> None:
    lm = decoder()
    encoder, half = arc.begin(lm, pool=3, hidden=None), lm.model.config.layers[0]
    plain = dataclasses.replace(encoder.model, config=dataclasses.replace(encoder.model.config, layers=(half,) * 2))
    tokens = jnp.asarray([TEXTS[0]]) % 20
    before = plain.apply({**encoder.params, "layers": lm.params["layers"]}, tokens, jnp.array([11]))[0]
    np.testing.assert_allclose(encoder.model.apply(encoder.params, tokens, jnp.array([11]))[0], before, atol=1e-5)


def test_texts_need_the_encoders_own_tokenizer(released: Path) -> None:
    with pytest.raises(ValueError, match="context 0: got text, but this encoder has no tokenizer"):
        arc.load(released).vectors(["a"])
    lm = dx.load("pycode-draft")
    encoder = arc.begin(lm, layers=1, hidden=None)
    read = encoder.read(lm, [["x = 1\n", CompressedContext("def area(width, height):\n"), "    return"]])
    count = len(lm.tokenizer.encode("def area(width, height):\n", add_special_tokens=False))     # type: ignore[union-attr]
    assert read["inputs"].given.sum() == -(-count // 8) + 1


@pytest.mark.parametrize(("part", "change", "message"), [
    ("embedder_args", dict(compress_rates=[-4, -2]), "compress_rates: got"),
    ("embedder_args", dict(compress_rates=[16]), "compress_rates: got"),
    ("embedder_args", dict(memory_tokens=8), "memory_tokens: got 8, takes 0"),
    ("embedder_args", dict(causal_embedder=True), "causal_embedder: got True, takes False"),
    ("embedder_args", dict(pooling_module={"where": "between"}), "pooling_module: got"),
    ("bridge_args", dict(bridge_type=None), "bridge_type: got None"),
    ("model_args", dict(dim=24), "tensor embedder.* got shape"),
    ("model_args", dict(n_layers=5), "has no tensor embedder.layers.2"),
])
def test_files_that_do_not_fit_are_refused_by_name(released: Path, part: str, change: dict[str, Any],
                                                    message: str) -> None:
    config = json.loads((released / "config.json").read_text())
    config[part] |= change
    (released / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        arc.load(released)


def test_prompts_that_do_not_fit_are_refused_by_name(released: Path) -> None:
    lm, found = decoder(), arc.load(released)
    with pytest.raises(ValueError, match=r"prompts\[0\]: takes as its last part a text"):
        found.read(lm, [[CompressedContext([1, 2])]])
    with pytest.raises(ValueError, match="context 0: is empty"):
        found.read(lm, [[CompressedContext([]), [1]]])
    with pytest.raises(ValueError, match="context 0: got token id 32, takes 0 to 31"):
        found.read(lm, [[CompressedContext([32]), [1]]])
    with pytest.raises(ValueError, match="chunk: got 0"):
        found.read(lm, [[CompressedContext([3]), [1]]], chunk=0)
    with pytest.raises(ValueError, match="lm: got a Transformer of width 64, takes a Transformer of width"):
        found.read(dx.load("pycode-draft"), [[CompressedContext([3]), [1]]])
    with pytest.raises(ValueError, match="texts: takes at least one with 256 tokens"):
        arc.fit(arc.begin(lm), lm, [[1, 2, 3]])
