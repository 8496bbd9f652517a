"""What is fitted to samples takes samples of any length."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decodax.algorithms import make
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative, fit_lengths, fit_predictor, fit_skipped_layers, fit_tree
from decodax.algorithms.speculative.adaptive.fit_sequoia import fit_acceptance, fit_sequoia
from decodax.algorithms.speculative.adaptive.fit_trees import continued
from decodax.algorithms.speculative.adaptive.measure import measure
from decodax.algorithms.speculative.drafts import DraftModel, NGramModel, Stand
from decodax.algorithms.speculative.trees import Fixed
from decodax.algorithms.speculative.trees.sequoia import sequoia_tree
from decodax.io.load import LM
from tests.laws.cases import VOCABULARY, model

NETWORK, WEIGHTS = model("llama")
LLAMA = LM(model=NETWORK, params=WEIGHTS, vocab_size=VOCABULARY)
NEW = 4


def sample(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, VOCABULARY - 1, length).tolist()


@pytest.mark.wide
def test_samples_of_any_length_are_continued() -> None:
    """Around the multiples of what a walk of the cache takes at once."""
    for total in (5, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 320, 321):
        s = continued(LLAMA, Autoregressive(), [sample(total - NEW), sample(3)], NEW)
        assert (np.asarray(s.length) == [total, 3 + NEW]).all()
        assert s.cache.capacity >= total


FITS: dict[str, Callable[[Any], Any]] = {
    "fit_predictor": lambda samples: fit_predictor(LLAMA, NGramModel(VOCABULARY, order=2), samples, length=2,
                                                   max_new_tokens=16, temperature=1.0),
    "fit_tree": lambda samples: fit_tree(LLAMA, Speculative(Stand(VOCABULARY, order=2, k=2),
                                                            shape=Fixed.balanced(2, 1)), samples, nodes=2,
                                         max_new_tokens=NEW),
    "fit_skipped_layers": lambda samples: fit_skipped_layers(LLAMA, samples, trials=1, length=2, max_new_tokens=NEW),
    "fit_lengths": lambda samples: fit_lengths(LLAMA, DraftModel(NETWORK, WEIGHTS), samples, gamma=2, branches=2,
                                               layers=1, max_new_tokens=NEW, epochs=1),
}


@pytest.mark.wide(but=["fit_predictor"])
@pytest.mark.parametrize("fit", FITS)
def test_samples_between_two_multiples_are_fitted(fit: str) -> None:
    assert FITS[fit]([sample(150), sample(9)]) is not None


@pytest.mark.wide
def test_rounds_are_measured_at_any_length() -> None:
    assert len(measure(NETWORK, WEIGHTS, [Speculative(NGramModel(VOCABULARY))], length=300, vocab_size=VOCABULARY,
                       repeats=1, rounds=1)) == 1


@pytest.mark.wide
def test_sequoias_acceptance_is_measured_for_each_rank_and_gives_its_tree() -> None:
    draft, samples = DraftModel(NETWORK, WEIGHTS), [sample(9), sample(4), sample(12)]
    assert fit_acceptance(LLAMA, draft, samples, 3, max_new_tokens=16, temperature=1.0) == (1, 0, 0)
    chain = fit_sequoia(LLAMA, draft, samples, 5, length=5, ranks=3, max_new_tokens=16, temperature=1.0)
    assert chain.is_chain and chain.length == 5
    table = NGramModel(VOCABULARY, order=2)
    found = fit_acceptance(LLAMA, table, samples, 4, max_new_tokens=32, temperature=1.5)
    assert 0 < found[0] < 1 and sum(found) < 1
    tree = fit_sequoia(LLAMA, table, samples, 6, ranks=4, max_new_tokens=32, temperature=1.5)
    assert tree == sequoia_tree(found, 6, 8)
    with pytest.raises(ValueError, match=r"sizes: got \(1,\), takes one or more numbers of at least 2"):
        fit_sequoia(LLAMA, table, samples, sizes=[1])


@pytest.mark.wide
def test_sequoia_measures_acceptance_on_samples_and_takes_its_tree() -> None:
    """A model accepts its own first choices and no others in greedy decoding, so the best tree is a chain."""
    samples = [sample(9), sample(4)]
    own: Any = make("sequoia", LLAMA, LLAMA, samples=samples, nodes=5, length=None)
    assert own.shape.is_chain and own.shape.length == 5
    typical: Any = make("sequoia", LLAMA, LLAMA, nodes=5, length=None)
    assert typical.shape == sequoia_tree((0.6, 0.15, 0.07, 0.04), 5) != own.shape


def test_sequoia_takes_samples_or_what_they_would_give() -> None:
    for given in (dict(acceptance=(0.5, 0.1)), dict(shape=Fixed.balanced(2, 1))):
        with pytest.raises(ValueError, match=r"^samples: got some beside acceptance=.* takes one of the three"):
            make("sequoia", LLAMA, LLAMA, samples=[[1, 2]], **given)
    with pytest.raises(ValueError, match=r"^samples: got some without the model that they are measured with"):
        make("sequoia", draft=LLAMA, samples=[[1, 2]])


@pytest.mark.full
def test_the_size_of_sequoias_tree_follows_from_measured_times() -> None:
    tree = fit_sequoia(LLAMA, NGramModel(VOCABULARY, order=2), [sample(9)], sizes=(2, 4), ranks=3, max_new_tokens=NEW)
    assert len(tree.paths) in (2, 4)
