"""What LAQ and KVzip ask the model for, and where they refuse."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import OwnCache
from decodax.caches import make
from decodax.caches.evict.heads.kvzip import Reconstruction
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.models import Transformer
from tests.caches.evict.lookahead import MODEL
from tests.caches.evict.pressed import TEXTS, keeps, weights
from tests.caches.small import PROMPTS, SMALL


@pytest.mark.wide
@pytest.mark.parametrize("window", [8, 0])
def test_the_tokens_of_the_authors_are_kept(window: int) -> None:
    """LAQ++ and LAQ; what decoding runs ahead on is SnapKV's choice."""
    lm = LM(model=MODEL, params=weights(MODEL), vocab_size=320)
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "laq.json").read_text())["cases"][str(window)]
    prompts = [[*text, row["tokens"][0]] for text, row in zip(TEXTS, wanted, strict=True)]
    kind = make("laq", budget=64, max_lookahead_size=8, stage2_window_size=window, pooling="mean")
    cache = Job.begin(Request.read(lm, prompts, cache=kind, max_new_tokens=1)).state.cache
    keeps(cache, [row["kept"] for row in wanted])


@pytest.mark.wide
def test_sentences_are_written_by_the_tokenizer(tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    score = Reconstruction().of_model(lm)
    spell = lambda text: tuple(lm.tokenizer.encode(text, add_special_tokens=False))
    assert score.ask == spell("\n\nRepeat the previous context exactly.")
    assert score.answer == spell("\n<assistant>")
    again = dx.generate(lm, "def area(width): return width", cache="kvzip:budget=0.4", max_new_tokens=4)
    assert again.lengths.tolist() == [4]


def test_a_text_that_leaves_no_positions_to_repeat_it_is_refused() -> None:
    assert isinstance(SMALL.model, Transformer)
    config = dataclasses.replace(SMALL.model.config, learned_positions=64, layers=tuple(
        dataclasses.replace(layer, rope=None) for layer in SMALL.model.config.layers))
    model = Transformer(config)
    lm = LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=16)
    options = dict(ask=(1,), go_on=(1,), answer=(1,))
    assert dx.generate(lm, PROMPTS[2], cache=make("kvzip", chunk_size=8, **options),
                       max_new_tokens=4).lengths.tolist() == [4]
    kind = make("kvzip", **options)
    for given in (dict(cache=kind), dict(algorithm=Speculative(OwnCache(kind)))):
        with pytest.raises(ValueError, match=r"^cache: prompt and what the policy reads after it are 92"):
            dx.generate(lm, PROMPTS[0], max_new_tokens=4, **given)
