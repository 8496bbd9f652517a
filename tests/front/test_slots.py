"""The slots of the front ends: an object and its string say the same, and a model is said once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx

IDS = [[40, 41, 42, 40, 41, 42]]


@pytest.fixture(scope="module")
def lm(tiny_model: Path) -> dx.LM:
    return dx.load(tiny_model)


def run(lm: Any, **options: Any) -> np.ndarray:
    return dx.generate(lm, IDS, max_new_tokens=6, **options).tokens


@pytest.mark.wide
def test_a_method_made_without_its_draft_model_takes_that_of_the_call(lm: dx.LM) -> None:
    method = dx.algorithms.speculative_decoding(length=2)
    said = [run(lm, algorithm=x, draft=lm, temperature=0.8) for x in (method, "speculative-decoding:length=2")]
    assert np.array_equal(*said)
    for incomplete in (method, "speculative-decoding"):
        with pytest.raises(ValueError, match=r"^draft: 'speculative-decoding' needs a draft model: generate\(draft="):
            run(lm, algorithm=incomplete)
    with pytest.raises(ValueError, match="draft: takes a method that misses a draft model beside it"):
        run(lm, algorithm=dx.Autoregressive(), draft=lm)
    with pytest.raises(TypeError, match=r"algorithm: got dx\.algorithms\.fast_dllm\(\)|cache: got dx\.algorithms"):
        run(lm, cache=dx.algorithms.fast_dllm())


@pytest.mark.parametrize("name", ["universal-self-consistency", "equilibrium-ranking"])
def test_a_rule_that_asks_a_model_asks_that_of_the_call(lm: dx.LM, name: str) -> None:
    options = dict(num_samples=2, max_new_tokens=3, temperature=1.0)
    made = getattr(dx.select, name.replace("-", "_"))
    said = [dx.generate(lm, "ab", select=rule, **options).findings["scores"] for rule in (name, made(), made(lm=lm))]
    assert np.array_equal(said[0], said[1]) and np.array_equal(said[0], said[2])
    nested = dx.select.quality_aware(lambda prompt, texts: [0.0] * len(texts), rule=made())
    assert np.array_equal(dx.generate(lm, "ab", select=nested, **options).findings["scores"], said[0])
    with pytest.raises(ValueError, match=r"^lm: .* asks a model, and got none; takes lm="):
        made().choose(dx.select.Candidates(["a", "b"], "c"))


def test_every_front_end_takes_a_sampling_object(lm: dx.LM) -> None:
    sampling, options = dx.Sampling(temperature=0.9, top_k=5), dict(seed=3, max_new_tokens=5)
    want = dx.generate(lm, "ab", sampling=sampling, **options).text
    assert want == dx.generate(lm, "ab", temperature=0.9, top_k=5, **options).text
    assert ["".join(dx.stream(lm, "ab", sampling=sampling, **options))] == want
    served = list(dx.serve(lm, [{"prompt": "ab", "sampling": {"top_k": 5}}], sampling=dx.Sampling(temperature=0.9),
                           slots=1, **options))
    assert served[0].result is not None and served[0].result.text == want
    chosen = dx.select.choose(lm, "ab", "likelihood", num_samples=1, sampling=sampling, **options)
    assert chosen.text == want
    with pytest.raises(ValueError, match=r"^temperature: got it in sampling= and as an argument"):
        dx.stream(lm, "ab", sampling=sampling, temperature=0.1)
    with pytest.raises(TypeError, match=r"^select: stream takes no such argument; .* use generate"):
        dx.stream(lm, "ab", select="mbr")


def test_a_string_of_a_constraint_says_what_the_object_says(lm: dx.LM) -> None:
    options = dict(max_new_tokens=8, temperature=1.0)
    for text, made in (("regex:[0-9]{2}", dx.constraints.regex("[0-9]{2}")),
                       ("choices:(yes,no)", dx.constraints.choices(["yes", "no"]))):
        assert dx.generate(lm, "a", constraint=text, **options).text == dx.generate(lm, "a", constraint=made,
                                                                                     **options).text


def test_a_model_is_scored_by_what_load_calls_it(lm: dx.LM, tiny_model: Path) -> None:
    assert dx.score(str(tiny_model), ["abc"]).sum.tolist() == dx.score(lm, ["abc"]).sum.tolist()
    with pytest.raises(TypeError, match=r"^lm: got 3, takes"):
        dx.score(3, ["abc"])        # type: ignore[arg-type]


def test_a_stream_that_is_closed_gives_no_further_piece(lm: dx.LM) -> None:
    with dx.stream(lm, "ab", max_new_tokens=40) as pieces:
        first = next(pieces)
    assert isinstance(first, str) and list(pieces) == [] and "closed" in repr(pieces)
    pieces.close()
    whole = dx.stream(lm, "ab", max_new_tokens=4)
    with whole:
        text = "".join(whole)
    assert whole.result is not None and whole.result.text == [text]


def test_a_result_is_ready_for_json(lm: dx.LM) -> None:
    out = dx.generate(lm, ["ab", "c"], num_samples=2, max_new_tokens=3, temperature=1.0, select="likelihood",
                      logprobs=2, top_k=2)
    said = json.loads(json.dumps(out.to_dict(), allow_nan=False))
    assert said["text"] == out.text and said["status"] == ["length", "length"]
    assert len(said["findings"]["texts"][0]) == 2
    served = next(iter(dx.serve(lm, ["ab"], max_new_tokens=2)))
    assert json.loads(json.dumps(served.to_dict(), allow_nan=False))["index"] == 0
