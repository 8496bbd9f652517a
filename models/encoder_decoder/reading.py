"""Reads a Hugging Face `config.json` as an `EncoderDecoderConfig`, with one function for each layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from decodax.models.config import NormConfig
from decodax.models.encoder_decoder.config import (
    EncoderDecoderConfig,
    LearnedPositions,
    RelativePositions,
    Sinusoids,
    Stack,
    t5,
)
from decodax.models.encoder_decoder.names import LOGITS_BIAS, TABLES
from decodax.models.fields import checked
from decodax.models.reading import Json, head_width, read_activation


def read_encoder_decoder(c: Json, present: Collection[str]) -> EncoderDecoderConfig:
    """Returns the encoder-decoder that a `config.json` describes.

    Args:
        c: the content of the file.
        present: names of the tensors of its weights.

    Raises:
        ValueError: an entry is missing, of the wrong type or out of its range, or an option is not supported.
    """
    c = checked(c)
    kind = c["model_type"]
    try:
        return ENCODER_DECODERS[kind](c, present)
    except KeyError as e:
        raise ValueError(f"config.json of a {kind} model lacks {e}") from None


def _t5(c: Json, present: Collection[str]) -> EncoderDecoderConfig:
    """Reads a T5, version 1.0 or 1.1 (Raffel et al., 2020), or an mT5 (Xue et al., 2021)."""
    multilingual, tied = c["model_type"] == "mt5", "lm_head.weight" not in present
    kind = c.get("feed_forward_proj", "gated-gelu" if multilingual else "relu")
    gated, _, name = kind.rpartition("-")
    if gated not in ("", "gated"):
        raise ValueError(f"feed_forward_proj: got {kind!r}, takes an activation, or 'gated-' and one")
    # "gated-gelu" has always meant the tanh form
    activation = "gelu_tanh" if kind == "gated-gelu" else read_activation({"feed_forward_proj": name},
                                                                          "feed_forward_proj", name)
    return t5(
        c["vocab_size"], c["d_model"], c["num_heads"], c["d_kv"], c["d_ff"], c["num_layers"],
        c.get("num_decoder_layers", c["num_layers"]),
        positions=RelativePositions(c.get("relative_attention_num_buckets", 32),
                                    c.get("relative_attention_max_distance", 128)),
        eps=c.get("layer_norm_epsilon", 1e-6), activation=activation, gated=bool(gated), tied=tied,
        # Newer files have an entry for this; in older ones an untied head identifies version 1.1.
        scaled=not multilingual and c.get("scale_decoder_outputs", c.get("tie_word_embeddings", True)))


BUILDS = {"bart": (False, False, True), "mbart": (True, True, True), "m2m_100": (True, True, False),
          "marian": (False, False, False), "whisper": (True, True, False)}
"""By `model_type`: whether norms are before attention and MLP, at the end of a stack, and after the embeddings. Older
files have entries for these."""

FLAGS = ("normalize_before", "add_final_layer_norm", "normalize_embedding")


def _bart(c: Json, present: Collection[str]) -> EncoderDecoderConfig:
    """Reads a BART (Lewis et al., 2020), mBART (Liu et al., 2020), M2M-100 (Fan et al., 2021), NLLB (NLLB Team, 2022),
    Marian (Junczys-Dowmunt et al., 2018) or Whisper (Radford et al., 2023)."""
    kind, width = c["model_type"], c["d_model"]
    for key, does in zip(FLAGS, BUILDS[kind], strict=True):
        if key in c and c[key] is not does:
            raise ValueError(f"{key}: got {c[key]!r}, which a {kind} model does not have here; takes {does}")
    pre, _, embed_norm = BUILDS[kind]
    if width % 2:
        raise ValueError(f"d_model: got {width}, takes an even number")
    separate, tied = kind == "marian" and not c.get("share_encoder_decoder_embeddings", True), c.get(
        "tie_word_embeddings", True)
    # transformers 5 has three tables where 4 had one and a head, and writes all that it has
    own = separate or (not tied and {*TABLES[1:]} <= {*present})
    activation = read_activation(c, "activation_function", "relu" if kind == "m2m_100" else "gelu")
    scaled = c.get("scale_embedding", kind == "m2m_100")
    if scaled and kind == "whisper":
        raise ValueError("scale_embedding: got true, which a whisper model does not have here; takes false")
    positions = {"m2m_100": _shifted_sinusoids, "marian": _sinusoids, "whisper": _audio}.get(kind, _learned)(c)
    stack = lambda side, own: Stack(
        c[f"{side}_layers"], c[f"{side}_attention_heads"], head_width(c, "d_model", f"{side}_attention_heads"),
        c[f"{side}_ffn_dim"], own)
    return EncoderDecoderConfig(
        vocab=c.get("decoder_vocab_size", c["vocab_size"]) if separate else c["vocab_size"], width=width,
        encoder=stack("encoder", positions[0]), decoder=stack("decoder", positions[1]),
        norm=NormConfig("layer", 1e-5, bias=True), pre_norm=pre, embed_norm=embed_norm, activation=activation,
        key_bias=kind != "whisper", embed_scale=math.sqrt(width) if scaled else 1.0,
        tied=tied, source_vocab=c["vocab_size"] if own else None, logits_bias=LOGITS_BIAS in present,
        features=c["num_mel_bins"] if kind == "whisper" else None)


Pair = tuple[LearnedPositions | Sinusoids, LearnedPositions | Sinusoids]


def _learned(c: Json) -> Pair:
    own = LearnedPositions(c.get("max_position_embeddings", 1024), offset=2)
    return own, own


def _sinusoids(c: Json) -> Pair:
    own = Sinusoids(c.get("max_position_embeddings", 1024), c["d_model"] // 2)
    return own, own


def _shifted_sinusoids(c: Json) -> Pair:
    if c["d_model"] < 4:
        raise ValueError(f"d_model: got {c['d_model']}, takes at least 4")
    own = Sinusoids(c.get("max_position_embeddings", 1024), c["d_model"] // 2 - 1, offset=c.get("pad_token_id", 1) + 1)
    return own, own


def _audio(c: Json) -> Pair:
    return LearnedPositions(c.get("max_source_positions", 1500)), LearnedPositions(c.get("max_target_positions", 448))


ENCODER_DECODERS: dict[str, Callable[[Json, Collection[str]], EncoderDecoderConfig]] = {
    "bart": _bart, "m2m_100": _bart, "marian": _bart, "mbart": _bart, "mt5": _t5, "t5": _t5, "whisper": _bart}
"""Reader of each family, by `model_type`."""
