"""Tokenizers of SentencePiece files with a separate vocabulary, against transformers."""

import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest

from decodax.io.files import CheckpointError
from decodax.io.load import _tokenizer
from decodax.io.sentence_pieces import LANGUAGES, PieceTokenizer, has_pieces, read_pieces
from tests.small_tokenizers import CORPUS

TEXTS = ["the model decodes a text", " two  spaces\tand a tab ", "", "Straße ﬁne ½ 日本語 🙂", "a</s>b <pad>", "▁low",
         ">>fra<< the model", "text >>fra<< x", "__de__ a text", "def f(x):\n    return x"]


LANGUAGE_TOKENS = [f"__{code}__" for code in LANGUAGES["m2m100"].split()]
"""The entry `additional_special_tokens` of released files."""


@functools.cache
def pieces(kind: str, seed: int = 0) -> bytes:
    """A small SentencePiece model."""
    import sentencepiece

    out = io.BytesIO()
    texts = [*CORPUS, *TEXTS[:2], "the model decodes a text of the encoder", "low lower lowest new newer"][seed:]
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(texts), model_writer=out, model_type=kind, vocab_size=120 + seed, hard_vocab_limit=False,
        bos_id=-1, normalization_rule_name="nmt_nfkc", minloglevel=2)
    return out.getvalue()


def names(model: bytes) -> list[str]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]


def write(path: Path, name: str, content: Any) -> None:
    (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def marian(path: Path, separate: bool) -> Any:
    """Writes the files of a Marian tokenizer, without a few pieces, and returns that of transformers."""
    import transformers

    source, target = pieces("unigram"), pieces("unigram", 3)
    write(path, "source.spm", source)
    write(path, "target.spm", target)
    vocab = lambda *of: {text: i for i, text in enumerate(dict.fromkeys(
        ["</s>", "<unk>", ">>fra<<", *sorted(text for model in of for text in names(model)[:-4]), "<pad>"]))}
    write(path, "vocab.json", vocab(source) if separate else vocab(source, target))
    if separate:
        write(path, "target_vocab.json", vocab(target))
    write(path, "tokenizer_config.json", {"source_lang": "en", "target_lang": "fr", "separate_vocabs": separate,
                                          "tokenizer_class": "MarianTokenizer", "model_max_length": 512})
    more = dict(target_vocab_file=str(path / "target_vocab.json")) if separate else {}
    return transformers.MarianTokenizer(str(path / "source.spm"), str(path / "target.spm"), str(path / "vocab.json"),
                                        separate_vocabs=separate, **more)


def m2m(path: Path) -> Any:
    import transformers

    model = pieces("bpe")
    write(path, "sentencepiece.bpe.model", model)
    vocab = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *names(model)[2:-3]])
    write(path, "vocab.json", {text: i for i, text in enumerate(vocab)})
    write(path, "tokenizer_config.json", {"src_lang": "fr", "tgt_lang": None, "language_codes": "m2m100"})
    return transformers.M2M100Tokenizer(str(path / "vocab.json"), str(path / "sentencepiece.bpe.model"), src_lang="fr",
                                        additional_special_tokens=LANGUAGE_TOKENS)


@pytest.mark.wide
@pytest.mark.parametrize("separate", [False, True])
def test_marian_texts_and_ids_are_those_of_transformers(tmp_path: Path, separate: bool) -> None:
    want, got = marian(tmp_path, separate), _tokenizer(tmp_path, family="marian")
    assert isinstance(got, PieceTokenizer) and isinstance(got.source, PieceTokenizer)
    for text in TEXTS:
        if separate and "<pad>" in text:
            continue        # transformers gives it the id of the source in both vocabularies
        assert got.source.encode(text) == want(text).input_ids, text
        ids = want(text_target=text).input_ids
        assert got.encode(text) == ids, text
        assert got.decode(ids).strip() == want.decode(ids, skip_special_tokens=True), text
    assert len({tuple(got.encode(text)) == tuple(got.source.encode(text)) for text in TEXTS}) == 2
    assert (got.eos_ids, got.pad_id) == ((want.eos_token_id,), got._vocab["<pad>"])


@pytest.mark.wide
def test_m2m_100_texts_and_ids_are_those_of_transformers(tmp_path: Path) -> None:
    want, got = m2m(tmp_path), _tokenizer(tmp_path, family="m2m_100")
    assert isinstance(got, PieceTokenizer) and got.source is None
    for text in TEXTS:
        ids = want(text).input_ids
        assert got.encode(text) == ids, text
        assert got.decode(ids).strip() == want.decode(ids, skip_special_tokens=True), text
    assert [got.backend.token_to_id(token) for token in LANGUAGE_TOKENS] == [
        want.get_lang_id(token[2:-2]) for token in LANGUAGE_TOKENS]
    # the files of transformers, and those that `save` copies
    for name in ("saved", "again"):
        (tmp_path / name).mkdir()
    want.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/tokenizer.json").unlink(missing_ok=True)
    again = read_pieces(tmp_path / "saved")
    again.save(tmp_path / "again")
    for tokenizer in (again, read_pieces(tmp_path / "again")):
        assert [tokenizer.encode(text) for text in TEXTS] == [got.encode(text) for text in TEXTS]


@pytest.mark.wide
def test_files_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    m2m(tmp_path)
    assert has_pieces(tmp_path) and not has_pieces(tmp_path.parent)
    for entry, value, takes in (("sp_model_kwargs", {"enable_sampling": True}, "takes none"),
                                ("language_codes", "other", "takes m2m100 or wmt21"),
                                ("src_lang", "xx", "takes one of")):
        write(tmp_path, "tokenizer_config.json", {entry: value})
        with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {entry}: got .*, {takes}"):
            read_pieces(tmp_path)
    write(tmp_path, "tokenizer_config.json", {})
    write(tmp_path, "vocab.json", {"<s>": 0, "<pad>": 1, "</s>": 2})
    with pytest.raises(CheckpointError, match=r"vocab\.json: lacks '<unk>', which is the unk_token"):
        read_pieces(tmp_path)
    write(tmp_path, "vocab.json", {"<s>": "0"})
    with pytest.raises(CheckpointError, match=r"vocab\.json: takes an object with the id of each piece"):
        read_pieces(tmp_path)
    m2m(tmp_path)
    write(tmp_path, "sentencepiece.bpe.model", b"no model")
    with pytest.raises(CheckpointError, match=r"sentencepiece\.bpe\.model: takes a SentencePiece model"):
        read_pieces(tmp_path)
