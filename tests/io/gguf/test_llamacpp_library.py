"""Small GGUF files of RWKV-7 and T5, and their tokenizers, give what llama.cpp gives (`pip install xllamacpp`).

The package has no Python function that runs an encoder, so that of its library is called.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import causal
from decodax.models import EncoderText
from decodax.models.layers import ACTIVATIONS
from tests.io.gguf.converting_rwkv7 import small
from tests.io.gguf.test_llamacpp import ours, peer, xllamacpp
from tests.io.gguf.test_t5 import TEXTS, written
from tests.io.gguf.writing import byte_level
from tests.models.small import score

pytestmark = pytest.mark.full
SOURCE = [5 + i * 7 % 110 for i in range(20)] + [1]
IDS = [0] + [4 + i * 11 % 120 for i in range(40)]
LENGTHS = (1, 2, 5, 16, 33)


class Params(ctypes.Structure):
    """Parameters whose fields are known by their places; longer than those of llama.cpp."""

    _fields_ = [("raw", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    """A batch that llama.cpp makes."""

    _fields_ = [("count", ctypes.c_int32), ("arrays", ctypes.c_void_p * 6)]


@functools.cache
def library() -> Any:
    """Returns the library, whose parameters have the places that are written to."""
    found, address = ctypes.CDLL(next(Path(xllamacpp.__file__).parent.glob("*.so"))), ctypes.c_void_p
    for name, gives, takes in (
            ("model_default_params", Params, []), ("context_default_params", Params, []),
            ("model_load_from_file", address, [ctypes.c_char_p, Params]),
            ("init_from_model", address, [address, Params]),
            ("batch_get_one", Batch, [address, ctypes.c_int32]), ("encode", ctypes.c_int32, [address, Batch]),
            ("decode", ctypes.c_int32, [address, Batch]), ("get_logits", ctypes.POINTER(ctypes.c_float), [address]),
            ("free", None, [address]), ("model_get_vocab", address, [address]), ("tokenize", ctypes.c_int32, [
                address, ctypes.c_char_p, ctypes.c_int32, address, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool])):
        function = getattr(found, f"llama_{name}")
        function.restype, function.argtypes = gives, takes
    found.llama_backend_init()
    raw = found.llama_context_default_params().raw
    if (raw[:3], raw[10:14], raw[26:28]) != ([512, 2048, 512], [2 ** 32 - 1] * 4, [1, 1]):
        pytest.skip("this version of llama.cpp has other parameters of a context")
    return found


@functools.cache
def opened(path: Path) -> Any:
    return library().llama_model_load_from_file(str(path).encode(), library().llama_model_default_params())


def logits(path: Path, vocabulary: int) -> np.ndarray:
    """Returns llama.cpp's logits of the token after each of the prefixes, without flash attention and with a cache in
    float32."""
    api, found = library(), []
    for length in LENGTHS:
        params = api.llama_context_default_params()
        params.raw[7] = params.raw[8] = 1       # threads
        params.raw[13] = params.raw[26] = params.raw[27] = 0
        context = api.llama_init_from_model(opened(path), params)
        source, text = np.array(SOURCE, np.int32), np.array(IDS[:length], np.int32)
        assert api.llama_encode(context, api.llama_batch_get_one(source.ctypes.data, len(source))) == 0
        assert api.llama_decode(context, api.llama_batch_get_one(text.ctypes.data, len(text))) == 0
        found.append(np.ctypeslib.as_array(api.llama_get_logits(context), (vocabulary,)).copy())
        api.llama_free(context)
    return np.array(found)


def tokens(path: Path, text: str) -> list[int]:
    """Returns the ids into which llama.cpp splits a text, with those that it adds."""
    api, own, found = library(), text.encode(), np.zeros(4 * len(text) + 16, np.int32)
    count = api.llama_tokenize(api.llama_model_get_vocab(opened(path)), own, len(own), found.ctypes.data, len(found),
                               True, True)
    return [*map(int, found[:count])]


def scored(lm: Any, model: Any) -> np.ndarray:
    window = causal(np.array([IDS]), jnp.zeros(1, jnp.int32))
    return np.asarray(score(model, lm.params, window, EncoderText.of([SOURCE])))[0][np.array(LENGTHS) - 1]


def rounded(x: Any) -> Any:
    """GELU by llama.cpp's table, whose entries are the numbers of 16 bits."""
    half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
    return jnp.where(x <= -10, 0.0, jnp.where(x >= 10, x, half(jax.nn.gelu(half(x), approximate=True))))


def test_probabilities_of_rwkv7_are_those_of_llama_cpp(tmp_path: Path) -> None:
    file = small(tmp_path, 128, 64, tokenizer=byte_level)[1]
    np.testing.assert_allclose(ours(dx.load(file)), peer(file), atol=1e-4)


def test_logits_of_t5_are_those_of_llama_cpp_without_the_factor_of_its_head(tmp_path: Path) -> None:
    """Version 1.0 multiplies hidden states with a factor, which llama.cpp leaves out."""
    file = written("t5-1.0", tmp_path)[1]
    lm: Any = dx.load(file)
    config, theirs = lm.model.config, logits(file, lm.vocab_size)
    plain = dataclasses.replace(lm.model, config=dataclasses.replace(config, head_scale=1.0))
    np.testing.assert_allclose(scored(lm, plain), theirs, atol=1e-3)
    np.testing.assert_allclose(scored(lm, lm.model), theirs * config.head_scale, atol=1e-3)
    assert config.head_scale == config.width ** -0.5


def test_logits_of_t5_with_gates_are_those_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp rounds GELU to 16 bits."""
    file = written("t5-1.1", tmp_path)[1]
    lm: Any = dx.load(file)
    theirs = logits(file, lm.vocab_size)
    np.testing.assert_allclose(scored(lm, lm.model), theirs, atol=0.1)
    jax.clear_caches()
    monkeypatch.setitem(ACTIVATIONS, "gelu_tanh", rounded)
    np.testing.assert_allclose(scored(lm, lm.model), theirs, atol=1e-3)
    jax.clear_caches()


@pytest.mark.parametrize("kind", ["rwkv7", "t5"])
def test_texts_are_split_as_in_llama_cpp(kind: str, tmp_path: Path) -> None:
    more: Sequence[str] = ("[[]日本語]日本語", "語の\n\nhello o w", "äu \t\r\n\x7f")
    file = small(tmp_path)[1] if kind == "rwkv7" else written("t5-1.0", tmp_path)[1]
    made: Any = dx.load(file).tokenizer
    for text in (*TEXTS, *more):
        assert made.encode(text) == tokens(file, text), text
