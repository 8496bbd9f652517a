"""Prompts that say their context twice (JRT-Prompt)."""

import numpy as np
import pytest

import decodax as dx
from decodax.front.read_twice import read_twice


def test_texts_ids_and_chats() -> None:
    twice = read_twice
    assert twice("a b", "c?") == "a b\nc?\na b\nc?"
    assert twice("a b", "c?", " ", "question context context question") == "c? a b a b c?"
    assert twice("a b c?") == "a b c?\na b c?"
    assert twice(np.array([3, 1]), [9], between=[0]) == [3, 1, 0, 9, 0, 3, 1, 0, 9]
    assert twice((3, 1)) == [3, 1, 3, 1]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "x"}]
    assert twice(chat) == [chat[0], {"role": "user", "content": "u\nu"}, chat[2]]
    assert chat[1]["content"] == "u"


def test_a_model_reads_it() -> None:
    lm = dx.load("sums")
    once = lm.tokenizer.encode("1+1=\n")
    out = dx.generate(lm, [read_twice("1+1=\n", between=""), read_twice(once)], max_new_tokens=4)
    assert out.tokens[0].tolist() == out.tokens[1].tolist()


def test_values_that_are_no_prompt_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^form: got 'cq', takes one of 'context question context question'"):
        read_twice("a", "b", form="cq")
    with pytest.raises(ValueError, match=r"^question: got one beside a chat"):
        read_twice([{"role": "user", "content": "u"}], "b")
    with pytest.raises(ValueError, match=r"^prompt: got a chat without a text of the user"):
        read_twice([{"role": "system", "content": "u"}])
    with pytest.raises(TypeError, match=r"^prompt: got int, takes a text"):
        read_twice(3)
    with pytest.raises(TypeError, match=r"^question: got a text, takes token ids"):
        read_twice([3], "b")
    with pytest.raises(TypeError, match=r"^question: got list, takes a text"):
        read_twice("a", [3])
