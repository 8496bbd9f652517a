"""Texts become the tokens of llama.cpp by the rules of released files, on small vocabularies made up here."""

from __future__ import annotations

import functools
import itertools
import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.splitting import RULES
from decodax.io.gguf.vocabulary import read_tokenizer
from decodax.io.pieces import byte_of_char
from tests.io.gguf.texts import HARD

RECORDED = json.loads((Path(__file__).parent / "splitting.json").read_text())
ONE_OF_EACH = {rule: name for name, rule in reversed(RULES.items())}.values()
"""A name for each rule."""
CHARS = {byte: char for char, byte in byte_of_char().items()}
CAPITALS = {text for text in HARD if any(word in text for word in ("getUser", "iPhone", "fooBar"))}
MARKS = {text for text in HARD if "हिन्दी" in text}
SPACES = {text for text in HARD if "\u3000" in text}
OWN = {"kimi-k2": CAPITALS | MARKS, "youtu": CAPITALS, "tiny_aya": CAPITALS, "gpt-4o": MARKS, "tekken": MARKS,
       "deepseek-llm": SPACES, "deepseek-coder": SPACES}
"""Texts that llama.cpp splits otherwise than the expressions of the models' own files: capitals end no word, marks are
no letters, and spaces beyond ASCII are in no range of characters."""


@functools.cache
def merged(raw: bool, count: int = 1500) -> tuple[tuple[str, str], ...]:
    """Returns `count` merges, each the most frequent pair, by which the texts' bytes become few tokens; with `raw` the
    characters, newlines apart from others."""
    words = [list(text.replace(" ", "▁")) if raw else [CHARS[byte] for byte in text.encode()] for text in HARD]
    if raw:
        words = [list(run) for word in words for _, run in itertools.groupby(word, lambda c: c == "\n")]
    found: list[tuple[str, str]] = []
    while len(found) < count and (pairs := Counter(pair for word in words for pair in itertools.pairwise(word))):
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i:i + 2] = ["".join(best)]
                i += 1
    return tuple(found)


def file(directory: Path, rule: str) -> Path:
    """Writes a small network with a vocabulary whose tokens reach over all pieces: whole texts, if nothing splits."""
    path = directory / f"{rule}.gguf"
    f = gguf.GGUFWriter(str(path), "llama")
    raw = rule == "gemma4"
    merges = merged(raw)
    # Two characters are spelled by bytes.
    chars = sorted({"▁", *"".join(HARD)} - {" ", "é", "🙂"})
    singles = [*(f"<0x{byte:02X}>" for byte in range(256)), *chars] if raw else sorted(byte_of_char())
    tokens = list(dict.fromkeys(["<bos>", "<eos>", "<unk>", *singles, *map("".join, merges)]))
    known = set(tokens)
    f.add_tokenizer_model("gemma4" if raw else "gpt2")
    f.add_tokenizer_pre(rule)
    f.add_token_list(tokens)
    f.add_token_types([3, 3, 2, *[6 if raw and i < 256 else 1 for i in range(len(tokens) - 3)]])
    f.add_token_merges([" ".join(pair) for pair in merges if known.issuperset(pair)])
    for name, id in (("bos", 0), ("eos", 1), ("unknown", 2)):
        f.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    f.add_add_bos_token(False)
    f.add_block_count(1)
    f.add_context_length(64)
    f.add_embedding_length(32)
    f.add_feed_forward_length(32)
    f.add_head_count(1)
    f.add_layer_norm_rms_eps(1e-5)
    square = [f"blk.0.{part}" for part in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    f.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm", *square):
        f.add_tensor(f"{name}.weight", np.zeros((32, 32) if name in square else 32, np.float32))
    f.write_header_to_file()
    f.write_kv_data_to_file()
    f.write_tensors_to_file()
    f.close()
    return path


def peer(path: Path) -> list[list[int]]:
    """Returns llama.cpp's ids of the texts."""
    xllamacpp: Any = pytest.importorskip("xllamacpp")
    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.warmup = str(path), 64, 1, False
    server, found = xllamacpp.Server(p), []
    for text in HARD:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(
                f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})) as answer:
            found.append(json.load(answer)["tokens"])
    return found


@pytest.mark.parametrize("rule", [*ONE_OF_EACH, "gemma4"])
def test_texts_are_split_as_in_llama_cpp(rule: str, tmp_path: Path) -> None:
    tokenizer: Any = read_tokenizer(GgufFile(file(tmp_path, rule)))
    for text, ids in zip(HARD, RECORDED["ids"][rule], strict=True):
        found = tokenizer.encode(text)
        assert tokenizer.decode(found) == text
        if text not in OWN.get(rule, set()):
            assert found == ids, text


@pytest.mark.full
@pytest.mark.parametrize("rule", [*ONE_OF_EACH, "gemma4"])
def test_recorded_tokens_are_those_of_llama_cpp(rule: str, tmp_path: Path) -> None:
    assert peer(file(tmp_path, rule)) == RECORDED["ids"][rule]


@pytest.mark.parametrize(("rule", "text", "pieces"), [
    ("kimi-k2", "getUserName iPhone", ["get", "User", "Name", " i", "Phone"]),
    ("kimi-k2", "漢字abc漢字ひ 12345", ["漢字", "abc", "漢字", "ひ", " ", "123", "45"]),
    ("youtu", "getUserName 12", ["get", "User", "Name", " ", "1", "2"]),
    ("tiny_aya", "fooBar 1234567", ["foo", "Bar", " ", "1", "234", "567"]),
    ("deepseek-llm", "\u3000full\u3000。", ["\u3000", "full", "\u3000。"])])
def test_rules_are_those_of_the_models_where_llama_cpp_simplifies(rule: str, text: str, pieces: list[str]) -> None:
    splits = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated")
                                      for pattern in RULES[rule].patterns])
    assert [piece for piece, _ in splits.pre_tokenize_str(text)] == pieces
