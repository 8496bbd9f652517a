"""Models, data and helpers of `test_self_infilling.py` that other tests use too."""

import dataclasses
import functools

import decodax as dx
from decodax.io.text import Tokenizer
from tests.algorithms.contrastive.followers import sharp
from tests.small_tokenizers import of_words

LETTERS = "a b c d e f g h i j k l m n o p q r s t P S M"


@functools.cache
def filling() -> dx.LM:
    return dataclasses.replace(sharp(), tokenizer=Tokenizer(of_words(f"{LETTERS} </s>", "</s>")),
                               generation_config={"eos_token_id": 23})
