"""Sources of an encoder: as texts, and grouped by their lengths."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import jobs
from decodax.core import drivers
from decodax.front.generate import _filled
from decodax.models import EncoderText
from tests.matrix import often
from tests.models.encoder_decoder.test_encoder_decoder import translator
from tests.models.encoder_decoder.tiny import loaded
from tests.models.small import tokens_of

LENGTHS = (3, 20, 14, 40, 2, 9, 33, 16, 5, 25, 47, 11)
SAMPLED: dict[str, Any] = dict(temperature=1.0, seed=3)
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "samples": dict(SAMPLED, num_samples=2)}


def rows_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    r = np.random.default_rng(seed)
    return [[*r.integers(3, 56, n - 1).tolist(), 2] for n in lengths]


def run(name: str, rows: list[list[int]], **options: Any) -> list[list[int]]:
    return tokens_of(loaded(name), [[]] * len(rows), inputs=EncoderText.of(rows), **{
        "algorithm": dx.Autoregressive(), "max_new_tokens": 6, "eos_token_id": [], "no_repeat_ngram_size": 1,
        "forced_bos_token_id": -1, "forced_eos_token_id": [], **options})


def test_the_widths_of_few_rows_are_raised_to_the_next() -> None:
    given = np.array([16, 128, 16, 32, 16, 64, 64])
    assert _filled(given, 2).tolist() == [16, 128, 16, 64, 16, 64, 64]
    assert _filled(given, 1).tolist() == given.tolist() and set(_filled(given, 9).tolist()) == {128}
    assert EncoderText.of(rows_of((3, 40))).widths.tolist() == [16, 64]
    wide = EncoderText(tokens=np.ones((2, 40), np.int32), length=np.array([40, 17], np.int32))
    assert wide.widths.tolist() == [40, 32] and wide.cut(32).tokens.shape == (2, 32)


@pytest.mark.wide
@pytest.mark.parametrize("case", often(["greedy", "samples"], WAYS))
def test_rows_grouped_by_their_sources_are_as_alone(case: str) -> None:
    """In rows that are refilled, and with beams, whose batches run to their ends."""
    rows, options = rows_of(LENGTHS), WAYS[case]
    alone = [row for i, one in enumerate(rows) for row in run("t5-1.1", [one], request_ids=[i], **options)]
    assert len(set(map(tuple, alone))) > 4
    assert run("t5-1.1", rows, batch_size=3, **options) == alone
    if not options:
        beams = dict(algorithm=dx.algorithms.beam_search(2), no_repeat_ngram_size=0, eos_token_id=[2])
        alone = [row for one in rows[:6] for row in run("t5-1.1", [one], **beams)]
        assert run("t5-1.1", rows[:6], batch_size=2, **beams) == alone


@pytest.mark.wide
def test_a_stream_of_lengths_compiles_few_programs() -> None:
    """The widths of sources after the first (32, 64) compile as many programs each, and other lengths compile none."""
    run("t5-1.0", rows_of((9,) * 12), batch_size=4)
    first = drivers.compiled()
    run("t5-1.0", rows_of((17,) * 12), batch_size=4)
    each = drivers.compiled() - first
    run("t5-1.0", rows_of((48,) * 12), batch_size=4)
    assert drivers.compiled() == first + 2 * each and each <= 8
    for seed in range(3):
        lengths = np.random.default_rng(seed).permutation(np.repeat([2, 18, 34], 4) + np.arange(12))
        run("t5-1.0", rows_of(tuple(lengths.tolist()), seed), batch_size=4)
    assert drivers.compiled() == first + 2 * each


@pytest.mark.wide
def test_served_sources_are_as_alone() -> None:
    rows = rows_of(LENGTHS[:6])
    options: dict[str, Any] = dict(max_new_tokens=6, eos_token_id=[], no_repeat_ngram_size=1, forced_bos_token_id=-1,
                                   forced_eos_token_id=[], algorithm=dx.Autoregressive())
    whole = EncoderText.of(rows)
    items = [{"prompt": [], "inputs": EncoderText(tokens=whole.tokens[i:i + 1], length=whole.length[i:i + 1])}
             for i in range(len(rows))]
    found = {one.index: one.result for one in dx.serve(loaded("t5-1.1"), items, slots=2, **options)}
    assert [found[i].row(0).tolist() for i in range(len(rows))] == run("t5-1.1", rows)


# Texts

PLAIN: dict[str, Any] = dict(max_new_tokens=4, eos_token_id=[], forced_bos_token_id=-1, forced_eos_token_id=[],
                             num_beams=1, no_repeat_ngram_size=1)
TEXTS = ["w11 w12", "w20", " ".join(f"w{i}" for i in range(5, 30))]


@functools.cache
def speller() -> Any:
    """The tiny T5 with the tokenizer of `translator`, which marks the language of a text. Its answers depend on it."""
    return dataclasses.replace(loaded("t5-1.1"), tokenizer=translator().tokenizer)


@functools.cache
def as_read(text: str, language: str | None = None) -> list[int]:
    """Tokens after one source."""
    lm = speller()
    options = {name: x for name, x in PLAIN.items() if name != "num_beams"}
    inputs = EncoderText.read(lm, text, language)
    return tokens_of(lm, "", inputs=inputs, algorithm=dx.Autoregressive(), **options)[0]


def test_sources_and_their_ids_are_checked() -> None:
    bart = loaded("bart")
    with pytest.raises(ValueError, match="inputs: got token id 64 in source 1, which is outside the encoder's vocab"):
        tokens_of(bart, [[2], [2]], inputs=EncoderText.of([[5], [6, 64]]))
    with pytest.raises(ValueError, match="inputs: got the length 9 for source 0, takes 1 to 4, the width of its tok"):
        tokens_of(bart, [[2]], inputs=EncoderText(tokens=np.ones((1, 4), np.int32), length=np.array([9], np.int32)))
    with pytest.raises(ValueError, match=r"inputs: .* has no tokenizer that is read here"):
        tokens_of(bart, [[2]], inputs="a text")
    with pytest.raises(ValueError, match="inputs: got text, and 'pycode' has no encoder that reads it; a model with"):
        dx.generate("pycode", "def", inputs="a text", max_new_tokens=1)
    with pytest.raises(ValueError, match="texts: got text, and 'pycode' has no encoder that reads it"):
        EncoderText.read(dx.load("pycode"), "a text")


@pytest.mark.wide
def test_texts_are_inputs() -> None:
    options = {name: x for name, x in PLAIN.items() if name != "num_beams"}
    run = functools.partial(tokens_of, speller(), algorithm=dx.Autoregressive(), **options)
    assert run(["", "", ""], inputs=TEXTS) == [as_read(text) for text in TEXTS] == run(
        ["", "", ""], inputs=TEXTS, batch_size=1)
    assert run("", inputs=TEXTS[0]) == [as_read(TEXTS[0])]
    served = {one.index: one.result for one in dx.serve(
        speller(), [{"prompt": "", "inputs": text} for text in TEXTS], algorithm=dx.Autoregressive(), **options)}
    assert [served[i].row(0).tolist() for i in range(3)] == [as_read(text) for text in TEXTS]


@pytest.mark.wide
def test_jobs_read_sources(tmp_path: Path) -> None:
    """A line that is a text alone is a source, and a prompt is what the answer begins with."""
    lines: list[Any] = [{"id": i, "source": text} for i, text in enumerate(TEXTS)]
    lines += [TEXTS[1], {"id": "ids", "source": [58, 20, 2]}, {"id": "said", "source": {
        "text": TEXTS[2], "language": "zul_Latn"}}, {"id": "prompt", "source": "w20", "prompt": "deu_Latn"}]
    wrong = [({"id": "none", "prompt": "x"}, "has no 'source', which the model's encoder reads"),
             ({"id": "kind", "source": 5}, "source: got 5, takes a text, token ids, or an object with a text"),
             ({"id": "keys", "source": {"text": "x", "lang": "y"}}, "source: got {'lang': 'y', 'text': 'x'}, takes"),
             ({"id": "unknown", "source": [99]}, "inputs: got token id 99 in source 0"),
             ({"id": "language", "source": {"text": "x", "language": "y"}}, "language: got 'y', which is no token")]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *(line for line, _ in wrong)]))
    found = jobs.run(speller(), source, tmp_path / "out", slots=2, tokens=True, **PLAIN)
    assert (found.finished, found.failed) == (len(lines), len(wrong))
    written = (tmp_path / "out/part-000-00000.jsonl").read_text().splitlines()
    rows = {row["id"]: row for row in map(json.loads, written)}
    assert [rows[i]["tokens"] for i in range(3)] == [as_read(text) for text in TEXTS]
    assert rows["line-4"]["tokens"] == rows["ids"]["tokens"] == as_read("w20")
    assert rows["said"]["tokens"] == as_read(TEXTS[2], "zul_Latn") != as_read(TEXTS[2])
    assert rows["prompt"]["prompt_tokens"] == 2
    errors = [json.loads(line)["error"] for line in (tmp_path / "out/_errors-000.jsonl").read_text().splitlines()]
    assert all(error.startswith(start) for error, (_, start) in zip(errors, wrong, strict=True)), errors

    with pytest.raises(ValueError, match="source: got 'de', and 'pycode' has no encoder that reads text"):
        jobs.run("pycode", source, tmp_path / "other", fields=jobs.Fields(source="de"))
    worker = jobs.Worker(speller(), slots=2, tokens=True, fields=jobs.Fields(source="de", language="fra_Latn"),
                         **PLAIN)
    table = worker({"id": ["a", "b"], "de": ["w20", None], "prompt": ["", ""]}).to_pylist()
    assert table[0]["tokens"] == as_read("w20", "fra_Latn") and "has no 'de'" in table[1]["error"]


@pytest.mark.wide
def test_the_command_line_takes_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from decodax.cli import main
    from tests.models.encoder_decoder.test_encoder_decoder import copied

    root = copied("t5-1.1", tmp_path / "t5")
    speller().tokenizer.save(root)
    (root / "generation_config.json").write_text(json.dumps({**PLAIN, "decoder_start_token_id": 0}))

    def run(*args: str) -> Any:
        code = main(["generate", "--model", str(root), "--quiet", *args])
        return code, *capsys.readouterr()

    code, out, err = run("--source", "w20", "--json")
    assert code == 0, err
    assert json.loads(out)["tokens"] == [as_read("w20")] and json.loads(out)["source"] == "w20"
    code, out, err = run("--source", "w20", "--source-language", "fra_Latn", "deu_Latn")
    assert code == 0 and out.strip(), err
    assert run("--source", "w20", "--source-language", "xyz")[0] == 2
    assert run("x", "--source-language", "fra_Latn")[2] == "decodax: error: --source-language goes with --source\n"
    assert main(["generate", "--source", "w20"]) == 2
    assert "--source: got text, and 'pycode' has no encoder that reads it" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": 0, "de": "w20"}) + "\n")
    assert main(["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "--model", str(root),
                 "--quiet", "--source-field", "de", "--source-language", "fra_Latn", "--tokens"]) == 0
    row = json.loads((tmp_path / "out/part-000-00000.jsonl").read_text())
    assert row["tokens"] == as_read("w20", "fra_Latn")


@pytest.mark.wide
def test_marian_reads_and_writes_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads texts with its SentencePiece files, also after `save`; without the package it takes token ids."""
    from tests.io.test_sentence_pieces import names, pieces, write
    from tests.models.encoder_decoder.test_encoder_decoder import copied

    root = copied("marian", tmp_path / "marian")
    model = pieces("unigram")
    vocab = {"<s>": 0, "<unk>": 1, "</s>": 2, **{text: i for i, text in enumerate(names(model)[3:63], 3)}, "<pad>": 63}
    for name, content in (("source.spm", model), ("target.spm", model), ("vocab.json", vocab)):
        write(root, name, content)
    lm = dx.load(root)
    options: dict[str, Any] = dict(algorithm=dx.Autoregressive(), max_new_tokens=6, forced_eos_token_id=[])
    out = dx.generate(lm, "", inputs="the model", **options)
    ids = EncoderText.read(lm, "the model")
    assert ids.tokens[0, int(ids.length[0]) - 1] == 2 and ids.length[0] > 2
    assert out.text == [lm.tokenizer.decode(out.row(0))] and out.text[0]
    assert out.tokens.tolist() == dx.generate(lm, [[63]], inputs=ids, **options).tokens.tolist()
    dx.save(lm, tmp_path / "again")
    assert dx.generate(dx.load(tmp_path / "again"), "", inputs="the model", **options).text == out.text
    monkeypatch.setattr("decodax.io.load.installed", lambda: False)
    with pytest.warns(UserWarning, match=r"takes and gives token ids; pip install decodax\[sentencepiece\] brings"):
        assert dx.load(root).tokenizer is None
