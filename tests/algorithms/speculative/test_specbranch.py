"""SpecBranch: what it prepares, what of that waits, and the classifier that says how much."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Lengths, Speculative, fit_lengths
from decodax.algorithms.speculative.adaptive.fit_lengths import embeddings, examples, fitted_to
from decodax.algorithms.speculative.adaptive.lengths import always
from decodax.algorithms.speculative.drafts import DraftModel, SpecBranch
from decodax.core import drivers
from decodax.core.window import causal
from decodax.io.load import LM
from tests.laws.cases import VOCABULARY, decode, model, prompts, start, texts

pytestmark = pytest.mark.wide

DRAFT = model("toy-draft")[1]
SOURCE = DraftModel(model("toy")[0])
IDS = prompts(6)
MIXED = dict(temperature=[0.0, 0.7] * 3)


@functools.cache
def outcome(draft):
    alg = Autoregressive() if draft is None else Speculative(draft)
    s = decode(alg, "toy", IDS, MIXED, new=24, draft=None if draft is None else DRAFT)
    return texts(s), *(np.asarray(x) for x in (s.stats.rounds, s.stats.accepted, s.stats.drafted))


def test_the_tokens_are_those_of_plain_decoding():
    assert outcome(SpecBranch(SOURCE, 4, 3, 0.4))[0] == outcome(None)[0]


def test_prepared_branches_save_rounds():
    one, three = outcome(SpecBranch(SOURCE, 4, 1, 0.0)), outcome(SpecBranch(SOURCE, 4, 3, 0.0))
    assert (three[1] <= one[1]).all() and three[1].sum() < one[1].sum()


def test_the_branches_are_the_likeliest_tokens_and_what_the_draft_model_would_write():
    least = 0.3
    alg = Speculative(SpecBranch(SOURCE, 4, 3, least))
    network, params, chain, s = start(alg, "toy", IDS, {}, draft=DRAFT)
    ahead = drivers.advance(alg, network, params, chain, s, jnp.int32(1)).algo[0]
    heads, rest, confident = (np.asarray(x) for x in (ahead.heads, ahead.rest, ahead.confident))

    @jax.jit
    def forward(tokens, count):
        window = causal(tokens[None], jnp.zeros(1, jnp.int32), (jnp.arange(32) < count)[None])
        return jax.nn.softmax(network.apply(DRAFT, window, network.init_cache(1, 64)).logits()[0, count - 1])

    probabilities = lambda ids: np.asarray(forward(np.resize(np.array(ids, np.int32), 32), len(ids)))
    counts = set()
    for row in range(6):
        assert heads[row].tolist() == np.argsort(-probabilities(IDS[row]))[:3].tolist()
        for branch in range(3):
            text, sure = [*IDS[row], int(heads[row, branch])], 3
            for i in range(3):
                p = probabilities(text)
                assert p.argmax() == rest[row, branch, i]
                if i and p.max() < least:
                    sure = min(sure, i)
                text.append(int(p.argmax()))
            assert confident[row, branch] == sure
            counts.add(sure)
    assert len(counts) > 1


LLAMA = LM(model=model("llama")[0], params=model("llama")[1], vocab_size=VOCABULARY)


def test_the_class_decides_how_much_waits():
    """Classifiers differ in weights alone, so all of these are one program."""
    draft = jax.tree.map(lambda x: 0.7 * x, LLAMA.params)

    def run(weights, least=0.0):
        alg = Speculative(SpecBranch(DraftModel(LLAMA.model), 4, 2, least, Lengths(layers=2)))
        return decode(alg, "llama", IDS, MIXED, new=12, draft={"source": draft, "lengths": weights})

    none, part, whole = (run(always(kind, 32, VOCABULARY)) for kind in range(3))
    plain = texts(decode(Autoregressive(), "llama", IDS, MIXED, new=12))
    assert all(texts(s) == plain for s in (none, part, whole))
    assert not np.asarray(none.stats.drafted).any()
    assert np.array_equal(part.stats.drafted, whole.stats.drafted)      # the draft is always sure enough
    assert set(np.asarray(whole.stats.drafted) % 3) == {0} and np.asarray(whole.stats.drafted).any()
    # a classifier that goes by the token alone, and by the states alone
    table = always(0, 32, VOCABULARY)
    table = table | dict(table=jnp.ones((VOCABULARY, 1)).at[:8].set(0), second=jnp.ones((1, 1)),
                         third=jnp.array([[0.0, 0, 2]]))
    some = run(table)
    assert texts(some) == plain
    assert 0 < np.asarray(some.stats.drafted).sum() < np.asarray(whole.stats.drafted).sum()


def test_training_finds_classes_that_go_by_states_and_tokens():
    rng = np.random.default_rng(0)
    seen, token = rng.normal(size=(600, 8)).astype(np.float32) * 5 + 3, rng.integers(0, 10, 600)
    embedding = rng.normal(size=(10, 4)).astype(np.float32)
    kind = np.where(embedding[token, 0] < -0.3, 0, np.where(seen[:, 1] > 3, 2, 1)).astype(np.int32)
    weights = fitted_to(seen[:400], token[:400], kind[:400], jnp.asarray(embedding), 200, 3e-3, 0)
    found = Lengths(layers=1).classify(weights, jnp.asarray(seen[400:]), jnp.asarray(token[400:]))
    assert (np.asarray(found) == kind[400:]).mean() > 0.9


def test_the_embeddings_are_the_models():
    assert np.array_equal(embeddings(LLAMA), LLAMA.params["embed"])


@pytest.mark.full
def test_a_fitted_classifier_tells_the_classes_of_its_samples_apart():
    source, ids = DraftModel(LLAMA.model, jax.tree.map(lambda x: 0.7 * x, LLAMA.params)), prompts(16)
    lengths = fit_lengths(LLAMA, source, ids, layers=2, temperature=0.7)
    seen, token, kind = examples(LLAMA, source, ids, 4, 3, 2, 64, temperature=0.7)
    found = np.asarray(lengths.classify(lengths.weights, seen, token))
    assert len(set(kind)) == 3 and (found == kind).mean() > 0.8
    alg = Speculative(SpecBranch(source, 4, 3, 0.4, lengths))
    plain = texts(decode(Autoregressive(), "llama", IDS, MIXED, new=24))
    assert texts(decode(alg.bare(), "llama", IDS, MIXED, new=24, draft=alg.weights)) == plain


def test_bad_arguments_are_refused_by_name():
    toy = LM(model=model("toy")[0], params=model("toy")[1], vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="lm: got Toy, takes a model whose layers run one by one"):
        fit_lengths(toy, SOURCE, IDS)
    with pytest.raises(ValueError, match="layers: got 3, takes 1 to 2"):
        fit_lengths(LLAMA, DraftModel(LLAMA.model), IDS, layers=3)
    with pytest.raises(ValueError, match="lengths: reads 4 layers of the target, which shows 0"):
        decode(Speculative(SpecBranch(SOURCE, lengths=Lengths())), "toy", IDS, {},
               draft={"source": DRAFT, "lengths": always(2, 32, VOCABULARY)})
