"""Tiny encoder-decoders of every family, as transformers writes them, and texts for them."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import decodax as dx
from decodax.models import EncoderText

VOCABULARY = 64
SOURCES = [[11, 12, 13, 14, 15, 16, 17, 18, 2], [21, 22, 2], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 2],
           [44, 2]]
T5 = dict(vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=4,
          relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0)
BART = dict(vocab_size=VOCABULARY, d_model=24, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=3, encoder_ffn_dim=32, decoder_ffn_dim=28, max_position_embeddings=48,
            pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5-1.0": ("t5", {**T5, "feed_forward_proj": "relu"}),
    "t5-1.1": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True}),
    "bart": ("bart", BART),
    "mbart": ("mbart", {**BART, "scale_embedding": True}),
    "nllb": ("m2m_100", {**BART, "scale_embedding": True}),
    "marian": ("marian", {**BART, "scale_embedding": True, "activation_function": "swish", "pad_token_id": 63,
                          "decoder_start_token_id": 63, "decoder_vocab_size": VOCABULARY, "bos_token_id": None}),
    "marian-separate": ("marian", {**BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 56,
                                   "decoder_start_token_id": 1, "bos_token_id": None}),
    "untied": ("bart", {**BART, "tie_word_embeddings": False}),
}
"""`model_type`, and entries of its config.json."""

AS_RELEASED: dict[str, dict[str, Any]] = {
    "bart": dict(num_beams=4, early_stopping=True, length_penalty=2.0, no_repeat_ngram_size=3, min_length=5,
                 max_length=14, forced_bos_token_id=0, forced_eos_token_id=2),
    "mbart": dict(num_beams=5, early_stopping=True, forced_bos_token_id=60, forced_eos_token_id=2, max_length=12),
    "nllb": dict(num_beams=3, forced_bos_token_id=61, max_length=12, no_repeat_ngram_size=2),
    "marian": dict(num_beams=6, bad_words_ids=[[63]], forced_eos_token_id=2, max_length=12),
}
"""Generation configs as released models have them: beams, forced tokens, the ban of n-grams."""


@functools.cache
def saved(name: str) -> tuple[Any, Path]:
    """A model of transformers with random weights, and the directory that it is saved in."""
    kind, entries = CASES[name]
    config = transformers.AutoConfig.for_model(kind, **entries)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    if kind == "t5" and entries.get("tie_word_embeddings") is False:     # transformers ties it all the same
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    fixed = "embed_positions" if kind in ("marian", "m2m_100") else "none"
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if fixed not in path:
                bias = path.endswith("bias")
                one = 1.0 if weight.ndim == 1 and not bias else 0.0
                weight.copy_(torch.randn_like(weight) * (0.1 if bias else 0.3) + one)
        for path, weight in model.named_parameters():
            if "shared" in path or "embed_tokens" in path:
                weight.mul_(3 if "t5" in kind else 1.5)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias) * 0.3)
    for key, value in AS_RELEASED.get(name, {}).items():
        setattr(model.generation_config, key, value)
    directory = Path(tempfile.mkdtemp())
    model.save_pretrained(directory)
    return model, directory


@functools.cache
def loaded(name: str) -> Any:
    return dx.load(saved(name)[1])


def padded(rows: list[list[int]], pad: int) -> dict[str, Any]:
    """Sources as transformers takes them."""
    most = max(map(len, rows))
    return {"input_ids": torch.tensor([row + [pad] * (most - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in rows])}


def source(rows: list[list[int]] = SOURCES) -> EncoderText:
    return EncoderText.of(rows)


def texts(rows: Any, end: int = 2) -> list[list[int]]:
    """Rows of ids without their start, up to the end token."""
    found = []
    for row in np.asarray(rows).tolist():
        row = row[1:]
        found.append(row[:row.index(end) + 1] if end in row else row)
    return found
