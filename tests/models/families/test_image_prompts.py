"""Prompts with images against whole models of transformers, whose own encoder gives the vectors."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.models import Images
from tests.matrix import often
from tests.models.families.image_prompts import CASES, case
from tests.models.small import attention


@pytest.mark.wide(but=("qwen3-vl",))
@pytest.mark.parametrize("name", often(["qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3", "mistral3"], CASES))
def test_logits_equal_those_of_the_whole_model(name: str) -> None:
    one = case(name)
    longest = max(map(len, one.prompts))
    tokens = np.array([[*row, *[0] * (longest - len(row))] for row in one.prompts], np.int32)

    @jax.jit
    def score(params: Any, images: Any) -> Any:
        hidden, head = one.lm.model.features(params, tokens, inputs=images)
        return head(hidden)

    ours = np.asarray(score(one.lm.params, one.images))
    worst = 0.0
    for row, prompt in enumerate(one.prompts):
        expected = one.logits(row)
        worst = max(worst, float(np.abs(ours[row, :len(prompt)] - expected).max()))
        np.testing.assert_allclose(ours[row, :len(prompt)], expected, atol=1e-4)
    print(f"{name}: largest difference of logits {worst:.2g}")


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3"], CASES))
def test_greedy_tokens_equal_those_of_the_whole_model(name: str) -> None:
    """In a ragged batch; with the prompt in chunks; with drafts in chains and trees; and each row alone."""
    one = case(name)
    expected = [one.greedy(row) for row in range(3)]
    assert len({token for row in expected for token in row}) > 3
    assert one.tokens() == expected
    if name == "gemma3":
        with pytest.raises(ValueError, match="chunk: got a prefill of 4 tokens a forward, takes at least 32"):
            one.tokens(chunk=4)
    else:
        assert one.tokens(chunk=4) == expected
    assert one.tokens(algorithm="prompt-lookup:length=3") == expected


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_other_ways_to_the_same_tokens(name: str) -> None:
    one = case(name)
    plain = one.tokens(temperature=1.0, seed=[3, 4, 5])
    tree = dx.Speculative(dx.drafts.DraftModel(attention(97)), shape=dx.trees.Fixed.balanced(2, 2))
    assert one.tokens(temperature=1.0, seed=[3, 4, 5], algorithm=tree) == plain
    for row in range(3):
        assert one.tokens((row,), temperature=1.0, seed=[3 + row], request_ids=[row]) == [plain[row]]
    samples = one.tokens(num_samples=2, temperature=1.0, seed=[3, 4, 5])
    assert samples[::2] == plain and samples != plain
    assert one.tokens(temperature=1.0, seed=[3, 4, 5], cache="paged") == plain
    assert one.tokens(algorithm=dx.algorithms.beam_search(3)) == [one.greedy(row, num_beams=3) for row in range(3)]


def small() -> Any:
    """A model without a config.json, and prompts with images for it."""
    return attention(), [[3, 5, 5, 9], [4]], [[np.ones((2, 16))], []]


@pytest.mark.parametrize(("changes", "message"), [
    ({"token": None}, "token: got None, and .* names no image token; takes its id"),
    ({"embeddings": [[np.ones((3, 16))], []]}, r"embeddings: got 3 vectors for prompt 0, which has 2 image tok"),
    ({"embeddings": [[np.ones((2, 8))], []]}, r"embeddings\[0\]: got an image of shape \(2, 8\), takes \[n, 16\]"),
    ({"embeddings": [[]]}, "embeddings: got 1 lists for 2 prompts"),
    ({"grids": [[(1, 2, 4)], []]}, "grids: got some, .* takes none"),
    ({"deepstack": [[np.ones((1, 2, 16))], []]}, "deepstack: got some, .* takes none"),
])
def test_images_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    lm, prompts, embeddings = small()
    with pytest.raises(ValueError, match=message):
        Images.of(lm, prompts, **{"embeddings": embeddings, "token": 5, **changes})


def test_a_gguf_file_does_not_say_how_it_sees_images() -> None:
    lm, prompts, embeddings = small()
    with pytest.raises(ValueError, match="of a GGUF file, which does not say how the model sees images"):
        Images.of(dataclasses.replace(lm, entries={"model_type": "qwen2"}), prompts, embeddings, token=5)


def test_vectors_of_tokens_are_what_the_tokens_are() -> None:
    """Rows of the embedding table as the vectors of an image give the logits of the plain text."""
    lm, prompts, _ = small()
    table = np.asarray(lm.params["embed"])
    images = Images.of(lm, prompts, [[table[[7, 8]]], []], token=5)
    tokens = np.array([[3, 5, 5, 9], [4, 0, 0, 0]], np.int32)
    hidden, head = lm.model.features(lm.params, tokens, inputs=images)
    same = np.array([[3, 7, 8, 9], [4, 0, 0, 0]], np.int32)
    np.testing.assert_allclose(head(hidden), lm.model.forward(lm.params, same), atol=1e-6)


@pytest.mark.parametrize(("changes", "message"), [
    ({"grids": None}, "grids: got none, .* takes them"),
    ({"deepstack": None}, "deepstack: got none, .* takes them"),
    ({"grids": [[(1, 4, 4)]]}, r"grids: got \(1, 4, 4\) patches for an image of 6 tokens in prompt 0, takes 4 for"),
    ({"grids": [[]]}, "grids: got 0 for the 1 images of prompt 0"),
    ({"prompts": [[96, 96, 4, 96, 96, 96, 96]]}, "prompts: the tokens of an image in prompt 0 are not adjacent"),
    ({"deepstack": [[np.zeros((1, 5, 32))]]}, r"deepstack: got \[5\] vectors a layer for prompt 0, takes .* \[6\]"),
])
@pytest.mark.wide
def test_grids_and_further_vectors_have_to_fit(changes: dict[str, Any], message: str) -> None:
    lm = case("qwen3-vl").lm
    given: dict[str, Any] = {"prompts": [[3, *[96] * 6, 4]], "embeddings": [[np.zeros((6, 32))]],
                             "grids": [[(1, 4, 6)]], "deepstack": [[np.zeros((1, 6, 32))]], **changes}
    with pytest.raises(ValueError, match=message):
        Images.of(lm, given.pop("prompts"), given.pop("embeddings"), **given)


@pytest.mark.wide
def test_what_cannot_read_images_says_so() -> None:
    """Caches that rotate keys to other positions, and methods that run layers one by one."""
    one = case("qwen3-vl")
    for cache in ("expected-attention:budget=16", "streaming-llm:recent_size=16", "shadowkv"):
        with pytest.raises(ValueError, match="images"):
            one.tokens(cache=cache)
    with pytest.raises(ValueError, match="takes a dense or paged cache, since the tokens of an image attend"):
        case("gemma3").tokens(cache="snapkv:budget=64")
    assert one.tokens(cache="snapkv:budget=64") == one.tokens()
