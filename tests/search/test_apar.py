"""APAR: threads are what plain decoding writes behind their paths, and the answer is what a recursion puts together.

`apar.json` has what `stream_generate_tree` of THUDM/APAR (5a78a9f, `fastchat/vs.py`) writes greedily where the logits
are those of `net` with a bias on `[Fork]` (22; `[Child]` is 23, the end 2), 16 tokens at most: prompt, bias, depth,
threads with their paths, and the text, in which `SAID` or a letter stands for a token.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import search
from decodax.core.state import Status
from decodax.io.text import Tokenizer
from decodax.search.branches import stitched
from decodax.search.forks import BY_TEXT, Forks
from tests.matrix import often
from tests.small_models import PROMPTS, net
from tests.small_tokenizers import of_words

pytestmark = pytest.mark.wide

EXPECTED = json.loads((Path(__file__).parent / "apar.json").read_text())
SAID = {5: "1. ", 7: "\n", 12: "\n"}
FORK, CHILD, END = 22, 23, 10
CONTROL: dict[str, Any] = dict(fork=FORK, child=CHILD)
TUNED: dict[str, Any] = dict(logit_bias={FORK: 5.0}, max_new_tokens=14, eos_token_id=END)
"""Stands in for tuning: `[Fork]` comes often."""
KINDS = {"greedy": {}, "sampled": dict(temperature=1.0, seed=5), "penalised": dict(temperature=0.7, top_k=9, seed=2,
                                                                                   repetition_penalty=1.3)}


def plain(paths: list[list[int]], keys: list[Any], bounds: list[int], depth: int, **options: Any) -> list[list[int]]:
    """What plain decoding writes behind paths: by `dx.generate`; or if it draws, by the keys of threads."""
    deep = [1 + path.count(CHILD) >= depth for path in paths]
    given = dict(options, max_new_tokens=[b - len(path) for b, path in zip(bounds, paths, strict=True)],
                 bad_words_ids=[[FORK, FORK], [CHILD, FORK]],
                 suppress_tokens=[[CHILD, FORK] if d else [CHILD, CHILD] for d in deep])
    if not options.get("temperature"):
        out = dx.generate(net(), paths, **given)
        return [out.row(i).tolist() for i in range(len(paths))]
    forks = Forks.begin(net(), paths, 1, **given)
    s = forks.job.state
    forks.job.state = s.replace(key=jnp.stack([*keys, *[keys[0]] * (s.batch - len(keys))]))
    forks.extend()
    return [forks.tokens(p, 0) for p in range(len(paths))]


def recursion(path: list[int], key: Any, bound: int, written: dict[tuple[int, ...], list[int]],
              keys: dict[tuple[int, ...], Any]) -> list[int]:
    """The answer behind a path, of what plain decoding writes; and the keys of the threads in it."""
    keys[tuple(path)] = key
    answer: list[int] = []
    for at, token in enumerate(own := written[tuple(path)], len(path) + 1):
        if token == FORK and at < bound:
            new = jax.random.fold_in(jax.random.fold_in(key, at), BY_TEXT)
            answer += recursion([*(path + own)[:at], CHILD], new, bound, written, keys)
        elif token not in (FORK, END):
            answer.append(token)
    return answer


@pytest.mark.parametrize(("kind", "depth"), often([("sampled", 2)],
                                                  [(kind, depth) for kind in KINDS for depth in (1, 2, 3)]))
def test_threads_are_plain_decoding_of_their_paths(kind: str, depth: int) -> None:
    options = {**TUNED, **KINDS[kind]}
    new = options.pop("max_new_tokens")
    enough = 48 if depth > 2 else 16        # while all are in use nothing forks
    out = dx.search.explore(net(), PROMPTS, dx.search.apar(**CONTROL, threads=enough, depth=depth),
                            max_new_tokens=new,
                     **options)
    assert out.details is not None
    tree = [t for tree in out.details for t in tree]
    bounds = [len(prompt) + new for prompt, tree in zip(PROMPTS, out.details, strict=True) for _ in tree]
    room = [i for i, t in enumerate(tree) if len(t.path) < bounds[i]]
    assert all(t.tokens == [] for i, t in enumerate(tree) if i not in room)
    keys: dict[tuple[int, ...], Any] = {}
    written = {tuple(t.path): t.tokens for t in tree}
    first = Forks.begin(net(), PROMPTS, 1, max_new_tokens=new, **options).keys
    for p, prompt in enumerate(PROMPTS):
        assert out.text[p] == recursion(prompt, first[p], len(prompt) + new, written, keys)
    assert len(keys) == len(tree) and (len(tree) > 6 if depth > 1 else len(tree) == 3)
    paths = [tree[i].path for i in room]
    assert [tree[i].tokens for i in room] == plain(paths, [keys[tuple(path)] for path in paths],
                                                   [bounds[i] for i in room], depth, **options)
    # all threads are one batch: a round for each token of the longest path, also of those that were put there
    rounds = [len(t.path) + len(t.tokens) - bound + new for t, bound in zip(tree, bounds, strict=True)]
    assert [t.rounds for t in tree] == rounds and out.result.stats.forwards == max(rounds)
    made = sum(len(t.tokens) for t in tree)
    assert out.tokens == made + len(tree) - 3 and (depth == 1 or made > 2 * max(rounds))
    whole = dx.score(net(), [(tree[i].path, tree[i].tokens) for i in room])
    np.testing.assert_allclose([tree[i].log_prob for i in room], [x.sum() for x in whole.logprobs], rtol=1e-4)
    np.testing.assert_allclose(out.scores[:, 0], [sum(t.log_prob for t in tree) for tree in out.details])


@pytest.mark.parametrize("threads", often([], [1, 2, 3]))
def test_threads_have_a_limit(threads: int) -> None:
    options = {**TUNED, **KINDS["sampled"]}
    out = dx.search.explore(net(), PROMPTS, dx.search.apar(**CONTROL, threads=threads, depth=4), **options)
    assert out.details is not None
    for prompt, tree in zip(PROMPTS, out.details, strict=True):
        # when each thread was there, in rounds; those that wait at a fork end later
        spans = [(t.rounds - len(t.tokens), t.rounds) for t in tree]
        assert all(sum(a < r <= b for a, b in spans) <= threads for r in range(1, 60))
        for t in tree:
            assert t.status in (Status.EOS, Status.LENGTH) and len(t.path) + len(t.tokens) <= len(prompt) + 14
    assert (max(map(len, out.details)) > 1) == (threads > 1)
    if threads == 1:
        never = dx.generate(net(), PROMPTS, **options, suppress_tokens=[FORK, CHILD])
        assert out.text == [[t for t in never.row(i).tolist() if t != END] for i in range(3)]


@pytest.mark.parametrize(("bias", "depth"), often([], [(4, 2), (6, 2), (8, 2), (5, 3), (6, 3)]))
def test_threads_and_texts_are_those_of_the_authors(bias: int, depth: int) -> None:
    cases = [c for c in EXPECTED if c[1:3] == [bias, depth]]
    method = dx.search.apar(**CONTROL, depth=depth, threads=16 if depth == 2 else 40)
    out = dx.search.explore(net(), [c[0] for c in cases], method, logit_bias={FORK: bias}, eos_token_id=2,
                            max_new_tokens=16)
    assert out.details is not None and len(cases) == 6
    for case, tree in zip(cases, out.details, strict=True):
        # in their last round a row may have been copied without a token of its own
        assert {tuple(t.path + t.tokens) for t in tree} == set(map(tuple, case[3]))
        spelled = lambda thread, first, ids, last: "".join(SAID.get(t, chr(97 + t)) for t in ids)
        assert stitched(tree, FORK, spelled, newlines=True) == case[4]


@functools.cache
def worded() -> dx.LM:
    words = "a b c d </s> e f g h i j k l m n o p q r s ! ? F C"
    return dataclasses.replace(net(), tokenizer=Tokenizer(of_words(words, "</s>")))


def test_texts_are_put_together_in_the_order_of_the_tree() -> None:
    lm, options = worded(), {**TUNED, **KINDS["sampled"]}
    prompts: list[Any] = ["abc", "jd", "egg"]
    out = dx.search.explore(lm, prompts, dx.search.apar(fork="F", child="C", threads=16), **options)
    tokenizer = lm.tokenizer
    assert tokenizer is not None and out.details is not None and max(map(len, out.details)) > 2
    bare = dx.search.explore(net(), [tokenizer.encode(x) for x in prompts], dx.search.apar(**CONTROL, threads=16),
                      **options)
    assert out.text == [tokenizer.decode(x) for x in bare.text] and out.texts == [[x] for x in out.text]
    assert not set("FC") & set("".join(out.text))


@pytest.mark.full
def test_threads_end_at_stop_strings_and_steps_change_nothing() -> None:
    lm, options = worded(), {**TUNED, **KINDS["sampled"]}
    given = dict(fork="F", child="C", threads=16)
    whole = dx.search.explore(lm, ["abc", "jd"], dx.search.apar(**given), **options)
    steps_of_two = dx.search.explore(lm, ["abc", "jd"], dx.search.apar(**given), step_tokens=2, until="g", **options)
    assert steps_of_two.text == whole.text
    stop = whole.text[0][len(whole.text[0]) // 2]
    cut = dx.search.explore(lm, ["abc", "jd"], dx.search.apar(**given), stop=stop, **options)
    assert cut.details is not None and stop not in cut.text[0]
    assert any(t.status == Status.STOP for t in cut.details[0])


def test_line_ends_are_repaired() -> None:
    tree = [search.Thread([0], None, [1, FORK, 2, FORK, 3, END], [(2, 1), (4, 2)], Status.EOS),
            search.Thread([0, 1, FORK, CHILD], 0, [5, END], [], Status.EOS),
            search.Thread([0, 1, FORK, 2, FORK, CHILD], 0, [6], [], Status.LENGTH)]
    said = {1: "1. x:", 2: "\nno number:", 3: "\n\nend", 5: "one", 6: "\ntwo"}
    read = lambda thread, first, ids, last: "".join(said[t] for t in ids)
    assert stitched(tree, FORK, read) == "1. x:one\nno number:\ntwo\n\nend"
    assert stitched(tree, FORK, read, newlines=True) == "1. x:\none\n\nno number:\ntwo\n\nend"


@pytest.mark.parametrize(("options", "message"), [
    (dict(fork="F", child=23), "fork: got 'F', but the model has no tokenizer"),
    (dict(fork=24, child=23), "fork: got 24, takes a token from 0 to 23"),
    (dict(fork=3, child=3), "fork and child: got token 3 for both"),
    (dict(fork=3), "'apar' needs child="), (dict(fork=3, child=2, threads=0), "threads: got 0"),
    (dict(fork=3, child=2, depth=True), "depth: got True")])
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dx.search.explore(net(), PROMPTS, dx.search.apar(**options))
    with pytest.raises(ValueError, match="child: got 'ab', which is 2 tokens"):
        dx.search.explore(worded(), "a", dx.search.apar(fork="F", child="ab"))


LIST = """Some ways:

1. Walk: it is slow, but
it costs nothing.

2. Ride：the bus comes every hour.
3. Fly: there is no airport at all.

So walk, if you can."""
PROSE = """Rivers carry water to the sea. They begin in hills.  They end in deltas.

Lakes keep it where it is. Some have no outlet.

Nothing here divides at all.

Seas take it all in the end. They give it back as rain. It begins anew.
"""


def test_structured_texts_become_examples_and_texts_again() -> None:
    main, *details = search.to_apar("How?", LIST)
    assert main.target == ("Some ways:\n\n1. Walk:[Fork]\n\n2. Ride：[Fork]\n3. Fly:[Fork]\n\nSo walk, if you can.")
    assert main.trained == 0 and {x.prompt for x in (main, *details)} == {"How?"}
    assert details[1].target == "Some ways:\n\n1. Walk:[Fork]\n\n2. Ride：[Fork][Child]the bus comes every hour."
    assert details[1].target[details[1].trained:] == "the bus comes every hour."
    assert details[0].target[details[0].trained:] == " it is slow, but\nit costs nothing."
    prose = search.to_apar("Water?", PROSE, fork="<f>", child="<c>")
    assert [x.target[x.trained:] for x in prose[1:]] == [
        "They begin in hills.  They end in deltas.", "Some have no outlet.",
        "They give it back as rain. It begins anew."]
    assert prose[0].target.startswith("Rivers carry water to the sea. <f>\n\nLakes")
    assert search.from_apar([main, *details]) == LIST and search.from_apar(prose, fork="<f>") == PROSE
    # what a thread of `apar` is written behind is what its example has in front of what is trained
    for i, x in enumerate(details):
        assert x.target[:x.trained] == "[Fork]".join(main.target.split("[Fork]")[:i + 1]) + "[Fork][Child]"


@pytest.mark.parametrize("text", ["One line.", LIST.replace("slow", "`<b>`"), "1. a: too short\n2. b: x\n3. c: y",
                                  PROSE.replace("hills", "Dr. Hill's"), "A b. C.\n\nD e. F.\n\nG h. I.", ""])
def test_texts_without_structure_make_no_examples(text: str) -> None:
    assert search.outline(text) is None and search.to_apar("?", text) == []


def test_examples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"text: got one with the control token '\[Fork\]'"):
        search.to_apar("?", LIST + "[Fork]")
    with pytest.raises(ValueError, match="examples: got 2 details for 3 places"):
        search.from_apar(search.to_apar("?", LIST)[:3])
