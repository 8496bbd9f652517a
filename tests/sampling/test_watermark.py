"""The green list: exact share, bias where it belongs, and a detector that tells marked text from unmarked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import decodax as dx
from decodax.sampling import GreenList, build, detect
from decodax.sampling.watermark import green_hits, permute
from tests.laws.toy import Toy
from tests.matrix import often
from tests.sampling.oracle import BATCH, apply, random_logits

VOCAB = 103
SCHEMES = [dict(seeding_scheme="lefthash"), dict(seeding_scheme="selfhash", context_width=3)]


def mark(batch: int = 1, **settings) -> GreenList:
    return build(batch, do_sample=True, vocab_size=VOCAB, watermarking_config=settings).transforms[-1]


@pytest.mark.parametrize("size", often([1, 2, 7, 101, 4097], [1, 2, 3, 7, 16, 100, 101, 1000, 4097]))
def test_a_key_permutes_the_vocabulary(size: int) -> None:
    seeds = jnp.arange(5, dtype=jnp.uint32)[:, None] * 977
    places = np.asarray(permute(seeds, jnp.arange(size, dtype=jnp.uint32)[None], size))
    np.testing.assert_array_equal(np.sort(places, 1), np.broadcast_to(np.arange(size), (5, size)))
    if size >= 100:
        assert len({tuple(row) for row in places}) == 5


def test_places_are_uniform_over_keys() -> None:
    size, keys = 20, 4000
    places = permute(jnp.arange(keys, dtype=jnp.uint32)[:, None], jnp.arange(3, dtype=jnp.uint32)[None], size)
    for column in np.asarray(places).T:
        counts = np.bincount(column, minlength=size)
        assert ((counts - keys / size) ** 2 / (keys / size)).sum() < 60       # 19 degrees of freedom, false alarm 5e-6
    together = np.asarray(places)[:, 0] * size + np.asarray(places)[:, 1]
    counts = np.bincount(together, minlength=size * size)
    pairs = np.delete(counts, np.arange(size) * (size + 1))
    assert ((pairs - keys / 380) ** 2 / (keys / 380)).sum() < 510             # 379 degrees of freedom, 5e-6


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_exactly_its_share_of_the_vocabulary_gets_the_bias(ratio: float) -> None:
    logits = random_logits(0, VOCAB)
    moved = apply(mark(BATCH, greenlist_ratio=ratio, bias=1.5), logits, [[1, 2], [1, 3], [9, 2]], 1) - logits
    assert ((moved > 1).sum(1) == int(VOCAB * ratio)).all()
    np.testing.assert_allclose(moved[moved > 1], 1.5, rtol=1e-5)
    green = moved > 1
    assert (green[0] != green[1]).any() and (green[0] == green[2]).all()        # the last token alone decides


def test_the_key_and_the_scheme_change_the_list() -> None:
    logits = np.zeros((BATCH, VOCAB), np.float32)
    text = [[4, 5, 6, 7]] * BATCH
    lists = [apply(mark(BATCH, **s), logits, text, 1)[0] > 0 for s in (dict(), dict(hashing_key=1), SCHEMES[1])]
    for i in range(3):
        assert (lists[i] != lists[i - 1]).any()


def test_selfhash_reads_its_whole_context() -> None:
    logits = np.zeros((BATCH, VOCAB), np.float32)
    texts = [[9, 4, 5], [8, 4, 5], [9, 3, 5]]
    green = apply(mark(BATCH, **SCHEMES[1]), logits, texts, 1) > 0
    assert (green[0] == green[1]).all() and (green[0] != green[2]).any()
    assert 10 < green.sum(1).min() and green.sum(1).max() < 45


def test_a_text_shorter_than_the_context_is_left_alone() -> None:
    logits = random_logits(0, VOCAB)
    np.testing.assert_array_equal(apply(mark(BATCH, **SCHEMES[1]), logits, [[1, 2]] * BATCH, 1), logits)


def write(green: GreenList, length: int, bias: float) -> np.ndarray:
    """A text drawn from a flat distribution with the mark."""
    @jax.jit
    def run(green: GreenList) -> jax.Array:
        def step(text: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            before = text[jnp.maximum(i - green.window + jnp.arange(green.window), 0)]
            lit = green.green(jnp.broadcast_to(before, (VOCAB, green.window)), jnp.arange(VOCAB), VOCAB)
            token = jax.random.categorical(jax.random.fold_in(jax.random.key(3), i), jnp.where(lit, bias, 0.0))
            return text.at[i].set(token), None

        return jax.lax.scan(step, jnp.arange(length) % VOCAB, jnp.arange(4, length))[0]

    return np.asarray(run(jax.tree.map(lambda x: x[0], green)))


@pytest.mark.wide
@pytest.mark.parametrize("scheme", SCHEMES, ids=["lefthash", "selfhash"])
def test_marked_text_is_detected_and_unmarked_is_not(scheme: dict) -> None:
    green = mark(**scheme)
    marked, plain = write(green, 200, 2.0), write(green, 200, 0.0)
    found = detect(green, [marked.tolist(), plain.tolist(), marked[:20].tolist()], VOCAB, skip=[4, 4, 4])
    assert found.z[0] > 6 and found.p_value[0] < 1e-8 and found.green[0] > 0.5
    assert abs(found.z[1]) < 4
    assert found.scored[2] <= 16 < found.scored[0]
    other = detect(mark(hashing_key=99, **scheme), [marked.tolist()], VOCAB, skip=4)
    assert abs(other.z[0]) < 4


def test_the_score_is_that_of_the_paper() -> None:
    green = mark()
    text = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    found = detect(green, [text], VOCAB, unique=False)
    one = jax.tree.map(lambda x: x[0], green)
    hits = int(one.green(jnp.array(text[:-1])[:, None], jnp.array(text[1:]), VOCAB).sum())
    share = 25 / 103
    np.testing.assert_allclose(found.z[0], (hits - share * 39) / np.sqrt(39 * share * (1 - share)))
    assert detect(green, [[1, 2] * 20], VOCAB).scored[0] == 2


def test_greedy_rows_are_marked_before_their_choice_and_others_after_truncation() -> None:
    policy = build(2, temperature=[0.0, 1.0], top_k=3, vocab_size=VOCAB, watermarking_config=dict(bias=2.0))
    first, *_, last = policy.transforms
    assert [first.bias.tolist(), last.bias.tolist()] == [[2.0, 0.0], [0.0, 2.0]]


def test_detection_names_what_it_cannot_score() -> None:
    with pytest.raises(ValueError, match="none can be scored"):
        detect(mark(), [[1]], VOCAB)
    with pytest.raises(ValueError, match="3 rows for 2 texts"):
        detect(mark(3), [[1, 2], [1, 2]], VOCAB)


@pytest.mark.parametrize("scheme", [dict(seeding_scheme="lefthash"), dict(seeding_scheme="selfhash", context_width=3)],
                         ids=["lefthash", "selfhash"])
def test_scores_are_those_of_transformers_for_the_same_green_lists(scheme: dict) -> None:
    green = mark(greenlist_ratio=0.3, bias=2.0, hashing_key=11, **scheme)
    one, share, n = jax.tree.map(lambda x: x[0], green), int(0.3 * VOCAB) / VOCAB, green.window + 1
    rng = np.random.default_rng(3)
    texts = [rng.integers(1, VOCAB, 40).tolist(), rng.integers(1, 4, 40).tolist()]
    grams = np.array([row[i:i + n] for row in texts for i in range(41 - n)])
    hits = np.asarray(green_hits(one, grams, VOCAB))
    lit = {tuple(gram) for gram, hit in zip(grams.tolist(), hits, strict=True) if hit}
    assert 10 < len(lit) < len(grams)

    def lists(seq: torch.Tensor) -> torch.Tensor:
        """What is green behind a context, of the texts; the second scheme asks about the last token alone."""
        seen = tuple(seq.tolist())
        spare = green.seeding_scheme == "selfhash"
        return torch.tensor([gram[-1] for gram in lit if (gram if spare else gram[:-1]) == seen], dtype=torch.long)

    for unique in (True, False):
        # a ratio there is a whole number of tokens here; no text begins with BOS
        detector = transformers.WatermarkDetector(
            transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=VOCAB), "cpu",
            dict(greenlist_ratio=share, bias=2.0, hashing_key=11, **scheme), ignore_repeated_ngrams=unique)
        detector.processor._get_greenlist_ids = lists
        ours = detect(green, texts, VOCAB, unique=unique)
        # under selfhash transformers also scores the last token of the first context, which nobody has marked
        theirs = detector(torch.tensor(texts)[:, green.seeding_scheme == "selfhash":], return_dict=True)
        np.testing.assert_array_equal(theirs.num_tokens_scored, ours.scored)
        np.testing.assert_allclose(ours.green, theirs.green_fraction, rtol=1e-9)
        np.testing.assert_allclose(ours.z, theirs.z_score, rtol=1e-6)
        np.testing.assert_allclose(ours.p_value, theirs.p_value, rtol=1e-5)


@pytest.mark.wide
def test_a_watermarked_text_is_detected_and_no_other() -> None:
    toy = Toy(spread=0.2)
    lm = dx.LM(model=toy, params=toy.init_params(), vocab_size=16)
    prompts, keyed = [[1, 2, 3], [4, 5]], dict(greenlist_ratio=0.5, bias=4.0)
    for scheme in ({}, dict(seeding_scheme="selfhash", context_width=3)):
        out = dx.generate(lm, prompts, num_samples=2, max_new_tokens=60, temperature=1.0,
                          watermarking_config={**keyed, **scheme})
        found = dx.detect_watermark(lm, out, {**keyed, **scheme}, prompts=prompts)
        assert (found.z > 3.5).all() and (found.p_value < 3e-4).all()
        alone = dx.detect_watermark(lm, [out.row(i) for i in range(4)], {**keyed, **scheme})
        assert (alone.scored <= found.scored).all() and (alone.z > 3.5).all()
    plain = dx.generate(lm, prompts, num_samples=2, max_new_tokens=60, temperature=1.0)
    assert (np.abs(dx.detect_watermark(lm, plain, keyed, prompts=prompts).z) < 4).all()
    with pytest.raises(ValueError, match="prompts: got 3 for 4 texts"):
        dx.detect_watermark(lm, plain, keyed, prompts=[[1]] * 3)
    with pytest.raises(ValueError, match="watermarking_config: got"):
        dx.detect_watermark(lm, plain, {"ratio": 1})
