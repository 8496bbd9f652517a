"""Scoring of given texts: the figures, what they do not depend on, and what is scored of each form of text."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import decodax as dx
from decodax.cli import main
from decodax.front import score
from decodax.front.score import Scores
from decodax.io.spans import spans
from decodax.io.text import Tokenizer
from decodax.models import Transformer, llama
from tests.laws.toy import Toy
from tests.meshes import mesh_of, spread
from tests.small_tokenizers import byte_level, of_words, sentencepiece

VOCAB = 41
CHUNK = 8
LENGTHS = [2, 9, 5, 30, 8, 1, 17, 23]          # within a window of 8, and up to four of them
TEXTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def lm() -> dx.LM:
    """A random Llama without a tokenizer."""
    model = Transformer(llama(vocab=VOCAB, width=32, layers=2, heads=8, kv_heads=4, mlp=64, context=64))
    return dx.LM(model=model, params=jax.tree.map(lambda x: x * 4, model.init_params(jax.random.key(0))),
                 vocab_size=VOCAB)


@pytest.fixture(scope="module")
def scores(lm: dx.LM) -> Scores:
    return dx.score(lm, TEXTS, chunk=CHUNK, batch_size=4, top_logprobs=3)


@pytest.fixture(scope="module")
def toy() -> dx.LM:
    return dx.LM(model=Toy(), params=Toy().init_params(), vocab_size=16)


@pytest.fixture(scope="module")
def exact(lm: dx.LM) -> np.ndarray:
    """Log-softmax of one full forward: `[texts, 30, V]`."""
    padded = np.array([text + [0] * (max(LENGTHS) - len(text)) for text in TEXTS])
    return np.asarray(jax.nn.log_softmax(jax.jit(lm.model.forward)(lm.params, padded)))


def equal(a: Scores, b: Scores, rows: list[int] | None = None) -> None:
    """The rows of `b` are those of `a`, bit for bit."""
    for name in ("logprobs", "tokens", "greedy", "top_ids", "top"):
        one, other = getattr(a, name), getattr(b, name)
        if one is not None:
            for i, j in enumerate(rows or range(len(b))):
                np.testing.assert_array_equal(other[i], one[j])


@pytest.mark.wide
def test_figures_are_those_of_a_full_forward(scores: Scores, exact: np.ndarray) -> None:
    for i, text in enumerate(TEXTS):
        rows, after = exact[i, :len(text) - 1], text[1:]
        assert scores.tokens[i].tolist() == after
        assert scores.logprobs[i].dtype == np.float32
        np.testing.assert_allclose(scores.logprobs[i], rows[np.arange(len(after)), after], atol=1e-5)
        np.testing.assert_array_equal(scores.greedy[i], rows.argmax(-1) == after)
        best = np.argsort(-rows, -1)[:, :3]
        np.testing.assert_array_equal(scores.top_ids[i], best)
        np.testing.assert_allclose(scores.top[i], np.take_along_axis(rows, best, -1), atol=1e-5)


@pytest.mark.wide(but=("mistral",))
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_figures_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.models.tiny import saved

    reference = saved(family, tmp_path)
    texts = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (6, 21)]
    found = dx.score(dx.load(tmp_path), texts, chunk=16)           # the sliding window of 5 lies across the border
    for text, logprobs in zip(texts, found.logprobs, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([text])).logits
        expected = logits.log_softmax(-1)[0, :-1].gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)


def test_batch_mates_and_their_order_do_not_show(lm: dx.LM, scores: Scores) -> None:
    options: dict[str, Any] = dict(chunk=CHUNK, batch_size=4, top_logprobs=3)
    backwards = list(range(len(TEXTS)))[::-1]
    equal(scores, dx.score(lm, [TEXTS[i] for i in backwards], **options), backwards)
    for i in (0, 3, 6):
        equal(scores, dx.score(lm, TEXTS[i], **options), [i])


def test_chunks_and_batches_change_no_more_than_rounding(lm: dx.LM, scores: Scores) -> None:
    for a, b in zip(dx.score(lm, TEXTS, chunk=32, batch_size=3).logprobs, scores.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_longer_mate_whose_cache_is_larger_does_not_show(toy: dx.LM) -> None:
    short, long = ([int(t) for t in np.random.default_rng(n).integers(0, 16, n)] for n in (600, 2100))
    alone, beside = dx.score(toy, [short], batch_size=2), dx.score(toy, [long, short], batch_size=2)
    equal(beside, alone, [1])


def test_few_programs_serve_all_lengths(toy: dx.LM) -> None:
    texts = [[1] * n for n in (1, 2, 3, 20, 33, 64, 65, 100, 129, 256, 257, 258, 500, 900)]
    before = score.score_window._cache_size()
    dx.score(toy, texts, batch_size=2)
    assert score.score_window._cache_size() - before <= 5
    with jax.no_tracing(True):
        dx.score(toy, [[2] * (n + 1) for n in (7, 40, 300, 1000)], batch_size=2)


def test_the_logits_of_a_window_are_never_all_there() -> None:
    """8 texts, windows of 256 and 50,000 entries: 410 MB of logits."""
    toy = Toy(vocabulary=50_000)
    params = jax.eval_shape(toy.init_params)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
    cache = jax.eval_shape(lambda: toy.init_cache(8, 1024))
    program = score.score_window.lower(toy, params, cache, shape(8, 257), shape(), shape(8), shape(8), top=0).compile()
    assert program.memory_analysis().temp_size_in_bytes < 3 * score.LOGITS


def test_a_continuation_is_scored_alone(lm: dx.LM, scores: Scores) -> None:
    pairs = [(text[:k], text[k:]) for text, k in zip(TEXTS, (1, 4, 2, 20, 7, None, 16, 1), strict=True) if k]
    found = dx.score(lm, pairs, chunk=CHUNK, batch_size=4)
    rows = [i for i in range(len(TEXTS)) if LENGTHS[i] > 1]
    for row, (i, pair) in enumerate(zip(rows, pairs, strict=True)):
        assert found.tokens[row].tolist() == pair[1]
        np.testing.assert_array_equal(found.logprobs[row], scores.logprobs[i][len(pair[0]) - 1:])
    np.testing.assert_allclose(found.sum, [x.sum() for x in found.logprobs], rtol=1e-6)


def test_a_window_scores_a_long_text_in_pieces(lm: dx.LM, scores: Scores) -> None:
    text = TEXTS[3]
    pieces = dx.score(lm, [text[:11], text[10:21], (text[19:21], text[21:])], chunk=CHUNK, batch_size=4)
    found = dx.score(lm, [text, TEXTS[1]], window=10, chunk=CHUNK, batch_size=4)
    np.testing.assert_array_equal(found.logprobs[0], np.concatenate(pieces.logprobs))
    np.testing.assert_array_equal(found.logprobs[1], scores.logprobs[1])
    assert found.tokens[0].tolist() == text[1:]


def test_sums_means_and_perplexities(scores: Scores) -> None:
    assert len(scores) == len(TEXTS)
    assert scores.count.tolist() == [n - 1 for n in LENGTHS]
    one = LENGTHS.index(1)
    assert scores.logprobs[one].shape == (0,) and scores.sum[one] == 0 and np.isnan(scores.perplexity[one])
    np.testing.assert_allclose(scores.perplexity[3], np.exp(-scores.logprobs[3].mean()), rtol=1e-5)
    np.testing.assert_allclose(scores.mean[3], scores.logprobs[3].mean(), rtol=1e-5)
    with pytest.raises(ValueError, match="bits_per_byte: the model has no tokenizer"):
        _ = scores.bits_per_byte


def test_greedy_text_is_greedy_and_other_text_is_not(toy: dx.LM) -> None:
    prompts = [[3, 1, 4], [1, 5]]
    new = dx.generate(toy, prompts, max_new_tokens=6, logprobs=0)
    other = [(prompts[0], (new.row(0) + 1) % 16)]
    found = dx.score(toy, [(p, new.row(i)) for i, p in enumerate(prompts)] + other, batch_size=2)
    assert found.is_greedy.tolist() == [True, True, False]
    np.testing.assert_allclose(np.stack(found.logprobs[:2]), new.logprobs.raw, atol=1e-5)


def test_a_prompt_and_its_continuation_are_encoded_as_one_text() -> None:
    tokenizer = Tokenizer(byte_level())
    whole = tokenizer.encode("def fib(n):\n    return n")
    span, = spans([("def fib(n):\n    ", "return n")], tokenizer, None, 500)
    assert span.ids == whole
    assert tokenizer.decode(span.ids[:span.start]) == "def fib(n):"          # white space goes with what follows
    assert span.bytes == len("\n    return n")


def test_a_token_across_the_border_belongs_to_the_continuation() -> None:
    tokenizer = Tokenizer(of_words("a b c ab bc"))
    _, b, c, ab, _ = range(5)
    assert [(s.ids, s.start) for s in spans([("ca", "b"), ("c", "ab"), ("ab", "c")], tokenizer, None, 5)] == [
        ([c, ab], 1), ([c, ab], 1), ([ab, c], 1)]
    span, = spans([("a", "b")], tokenizer, b, 5)                             # no token is left for the prompt
    assert (span.ids, span.start, span.bytes) == ([b, ab], 1, 1)
    assert spans([("", "b")], tokenizer, c, 5)[0].ids == [c, b]
    with pytest.raises(ValueError, match=r"texts\[0\]: the prompt is empty, and the model has no BOS"):
        spans([("a", "b")], tokenizer, None, 5)


def test_bytes_are_those_of_the_scored_text() -> None:
    tokenizer = Tokenizer(sentencepiece(), bos_id=1)
    texts = ["Héllo 日本", ("Héllo", " 日本"), tokenizer.encode("Héllo 日本"), ("", "né")]
    assert [s.bytes for s in spans(texts, tokenizer, 1, 1000)] == [13, 7, 13, 3]      # <s> has none


def test_a_chat_is_scored_by_its_template(tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    user, answer = {"role": "user", "content": "def"}, {"role": "assistant", "content": "fib"}
    chat, = spans([user, answer], lm.tokenizer, None, lm.vocab_size)
    assert lm.tokenizer.decode(chat.ids) == "<user>def\n<assistant>fib\n<assistant>"     # this template always opens
    pair, = spans([([user], "fib(n)")], lm.tokenizer, None, lm.vocab_size)
    assert pair.ids[:pair.start] == lm.tokenizer.encode_chat([user])
    assert lm.tokenizer.decode(pair.ids[pair.start:]) == "fib(n)"
    found = dx.score(lm, [([user], "fib(n)"), "déjà"])
    np.testing.assert_allclose(found.bits_per_byte, -found.sum / np.log(2) / [6, found.bytes[1]])


def test_tokens_after_a_nan_have_no_probability(lm: dx.LM, scores: Scores) -> None:
    token = TEXTS[3][25]                                                   # in the last of four windows
    broken = {**lm.params, "embed": lm.params["embed"].at[token].set(jnp.nan)}
    with pytest.warns(UserWarning, match=r"texts\[3\]: the model's logits hold a NaN or \+inf"):
        found = dx.score(dataclasses.replace(lm, params=broken), TEXTS, chunk=CHUNK, batch_size=4)
    for i, text in enumerate(TEXTS):
        read = text[:-1]
        if token not in read:                                              # also where a batch mate has it
            np.testing.assert_array_equal(found.logprobs[i], scores.logprobs[i])
        else:                                                              # of its own window nothing is sure
            sound = read.index(token) // CHUNK * CHUNK
            np.testing.assert_array_equal(found.logprobs[i][:sound], scores.logprobs[i][:sound])
            assert np.isnan(found.logprobs[i][sound:]).all() and np.isnan(found.sum[i]) and not found.is_greedy[i]


def test_a_token_that_is_not_in_a_text_cannot_break_it(lm: dx.LM, scores: Scores) -> None:
    """Rows are padded with what they hold."""
    broken = {**lm.params, "embed": lm.params["embed"].at[0].set(jnp.nan)}
    found = dx.score(dataclasses.replace(lm, params=broken), TEXTS[1], chunk=CHUNK, batch_size=4)
    np.testing.assert_array_equal(found.logprobs[0], scores.logprobs[1])


@pytest.mark.parametrize(("texts", "options", "message"), [
    ([], {}, "texts: got none"),
    ([[]], {}, r"texts\[0\]: is empty"),
    ([[1], [2, 41]], {}, r"texts\[1\]: token id 41 is outside the vocabulary of 41"),
    ([[1, -1]], {}, r"texts\[0\]: token id -1 is outside"),
    ("text", {}, r"texts\[0\]: got text, but this model has no tokenizer"),
    (([1], [2]), {}, r"texts: got a tuple, .*takes a list of them"),
    ([([1], [])], {}, r"texts\[0\]: the continuation is empty"),
    ([([], [1])], {}, r"texts\[0\]: the prompt is empty, and the model has no BOS"),
    ([([1], [2], [3])], {}, r"texts\[0\]: got a tuple of token ids, token ids, token ids; a prompt and"),
    ([[0.5, 1.0]], {}, r"texts\[0\]: got \[0\.5, 1\.0\]; takes a text, token ids"),
    ([None], {}, r"texts\[0\]: got None; takes a text"),
    ({"role": "user"}, {}, r"texts: got a mapping, takes a list of messages"),
    ([[1]], {"batch_size": 0}, "batch_size: got 0, takes a whole number from 1"),
    ([([1, 2, 3], [4])], {"window": 2}, r"texts\[0\]: prompt and continuation have 4 tokens, window=2 takes 3"),
    ([[1]], {"window": 0}, "window: got 0, takes a whole number from 1"),
    ([[1]], {"chunk": 2.5}, "chunk: got 2.5, takes a whole number from 1"),
    ([[1]], {"top_logprobs": -1}, "top_logprobs: got -1, takes a whole number from 0"),
    ([[1]], {"top_logprobs": 42}, "top_logprobs: got 42, the vocabulary has 41 entries"),
])
def test_texts_that_cannot_be_scored_are_refused_by_name(lm: dx.LM, texts: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dx.score(lm, texts, **options)


def test_texts_beyond_the_models_positions_are_refused(lm: dx.LM) -> None:
    config = dataclasses.replace(lm.model.config, learned_positions=16)
    model = Transformer(config)
    short = dx.LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"texts\[1\]: has 18 tokens, the model has 16 positions; window=16"):
        dx.score(short, [[1], [1] * 18])
    assert len(dx.score(short, [[1] * 17]).logprobs[0]) == 16                # the last token is not read
    with pytest.warns(UserWarning, match=r"texts\[0\]: has 70 tokens, the model was made for 64"):
        dx.score(lm, [[1] * 70], chunk=CHUNK, batch_size=4)


def test_a_model_that_fills_masks_is_refused() -> None:
    with pytest.raises(ValueError, match="lm: got 'tasks-diffusion', which fills masks"):
        dx.score(dx.load("tasks-diffusion"), ["1 + 1"])


def test_a_progress_bar_ends_where_the_texts_do(toy: dx.LM, capsys: pytest.CaptureFixture[str]) -> None:
    dx.score(toy, [[1, 2], [3] * 300], batch_size=2, progress=True)
    assert "scoring" in capsys.readouterr().err


def test_the_command_line_scores_files_and_lines(
        tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["def fib(n):", "    return n"]
    (tmp_path / "a.py").write_text("\n\n".join(texts), encoding="utf-8")
    file, lm = str(tmp_path / "a.py"), dx.load(tiny_model)
    expected = dx.score(lm, texts, batch_size=2)

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["score", *args, "--model", str(tiny_model), "--batch-size", "2"])
        return code, *capsys.readouterr()

    code, out, err = run(file, "--lines", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [row["name"] for row in report["texts"]] == [f"{file}:1", f"{file}:3"]
    np.testing.assert_allclose([row["logprob"] for row in report["texts"]], expected.sum)
    np.testing.assert_allclose([row["perplexity"] for row in report["texts"]], expected.perplexity)
    np.testing.assert_allclose([row["bits_per_byte"] for row in report["texts"]], expected.bits_per_byte)
    np.testing.assert_allclose(report["all"]["perplexity"], np.exp(-expected.sum.sum() / expected.count.sum()))
    code, out, _ = run(file, "--lines")
    assert code == 0 and len(out.splitlines()) == 4 and f"{expected.perplexity[1]:,.3f}" in out
    monkeypatch.setattr("sys.stdin", io.StringIO(texts[0]))
    assert json.loads(run("-", "--json")[1])["texts"][0]["tokens"] == expected.count[0]
    (tmp_path / "empty").write_text("")
    assert run(str(tmp_path / "empty")) == (2, "", "decodax: error: FILE: there is no text in it\n")
    assert run(file, "--window", "0")[0] == 2 and run(str(tmp_path / "none"))[0] == 1


@pytest.mark.mesh
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_gives_the_scores_of_one_device(lm: dx.LM, scores: Scores, kind: AxisType) -> None:
    found = dx.score(spread(lm, mesh_of(kind, data=2, model=4)), TEXTS, chunk=CHUNK, batch_size=3, top_logprobs=3)
    for i in range(len(TEXTS)):
        np.testing.assert_allclose(found.logprobs[i], scores.logprobs[i], atol=1e-5)
        np.testing.assert_array_equal(found.greedy[i], scores.greedy[i])
        np.testing.assert_array_equal(found.top_ids[i], scores.top_ids[i])
