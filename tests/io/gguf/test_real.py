"""Two published GGUF files give the tokens, answers and likelihoods of llama.cpp.

On packed files llama.cpp rounds the inputs of products to 8 bits, so that close choices differ: its own answers to 11
of the 30 questions do when it reads the same weights in float32. Answers here are those in float32.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from scripts.real_models import MODELS, TEXT, folder
from tests.io.gguf.texts import QUESTIONS, loaded, texts

pytestmark = [pytest.mark.real, pytest.mark.wide]
EXPECTED = json.loads((Path(__file__).parent / "llamacpp.json").read_text())
CLOSE = 1e-3
"""Where the two best logits are nearer than this, answers may part."""


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_200_texts(name: str) -> None:
    ids = [loaded(name).tokenizer.encode(text) for text in texts()]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == EXPECTED[name]["tokens"]


@pytest.mark.parametrize("name", MODELS)
def test_answers_end_at_the_same_tokens(name: str) -> None:
    assert sorted(loaded(name).eos) == EXPECTED[name]["ends"]


def test_greedy_answers_to_30_chats() -> None:
    lm = loaded("smollm2")
    chats = [lm.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = EXPECTED["smollm2"]["answers"]
    rows = np.zeros((len(chats), max(len(c) + len(a) for c, a in zip(chats, answers, strict=True))), np.int32)
    for row, chat, answer in zip(rows, chats, answers, strict=True):
        row[:len(chat) + len(answer)] = chat + answer
    # Each answer in one pass: greedy decoding gives it if each token is the best one after those before.
    best = np.asarray(jax.jit(lambda p, ids: lm.model.forward(p, ids).argmax(-1))(lm.params, jnp.asarray(rows)))
    parted = []
    for i, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
        found = best[i, len(chat) - 1:len(chat) + len(answer) - 1].tolist()
        first = next((j for j, pair in enumerate(zip(found, answer, strict=True)) if pair[0] != pair[1]), None)
        parted += [] if first is None else [EXPECTED["smollm2"]["gaps"][i][first]]
    print(f"{len(parted)} of {len(chats)} answers part, where the best logits differ by {parted}")
    assert all(gap < CLOSE for gap in parted)


def test_an_answer_is_generated_token_by_token() -> None:
    lm = loaded("smollm2")
    found = dx.generate(lm, [[{"role": "user", "content": QUESTIONS[0]}]], max_new_tokens=12)
    assert found.text == ["The capital of France is Paris."]


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_is_within_half_a_percent(name: str) -> None:
    lm, wanted = loaded(name), EXPECTED[name]["nats"]
    text = (Path(__file__).parents[3] / "LICENSE").read_text()
    ids, begin = lm.tokenizer.encode(text, add_special_tokens=False), lm.tokenizer.encode("")
    size = 512 - len(begin)
    pieces = [begin + ids[i * size:(i + 1) * size] for i in range(len(wanted))]
    run = jax.jit(lambda p, ids: -jnp.take_along_axis(
        jax.nn.log_softmax(lm.model.forward(p, ids[None])[0, :-1]), ids[1:, None], -1).mean())
    found = [float(run(lm.params, jnp.asarray(piece))) for piece in pieces]
    assert abs(np.exp(np.mean(found) - np.mean(wanted)) - 1) < 0.005, (found, wanted)


@pytest.mark.full
def test_perplexity_of_20_000_tokens_is_within_half_a_percent() -> None:
    """The perplexity is the one that `decodax score docstrings.txt --model FILE --window 512` prints."""
    path, wanted = folder() / TEXT.file, EXPECTED["smollm2"]["docstrings"]
    if not path.is_file():
        pytest.skip(f"{path} is missing: python scripts/real_models.py text")
    found = dx.score(loaded("smollm2"), [("", path.read_text(encoding="utf-8"))], window=512)
    assert found.count.tolist() == [wanted["tokens"]]
    assert abs(np.exp(-found.mean[0] - wanted["nats"]) - 1) < 0.005, (found.mean, wanted)
