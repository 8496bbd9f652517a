import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.stops import StopTable, cut_at_stop, first_match, held, stop_strings
from decodax.engine.methods import stop_table
from decodax.io.load import LM
from decodax.io.text import Tokenizer
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from tests.matrix import often
from tests.small_models import random_lm
from tests.small_tokenizers import KINDS, TEXTS, letters

VOCAB = [b"a", b"b", b"ab", b"ba", b"aab", b"\n", b"\n\n", b"xaby", b"", b"\xc3\xa9", b"\xc3", b"\xa9"]


def run(table: StopTable, tokens: list[int]) -> list[bool]:
    """Hits token by token."""
    state, hits = table.start(1), []
    for token in tokens:
        state, hit = table.advance(state, jnp.array([token]))
        hits.append(bool(hit[0]))
    return hits


def test_a_stop_string_is_found_across_token_borders() -> None:
    assert run(StopTable.build(VOCAB, "abba"), [0, 1, 3]) == [False, False, True]


def test_a_stop_string_is_found_in_the_middle_of_a_token() -> None:
    assert run(StopTable.build(VOCAB, "ab"), [1, 7]) == [False, True]


def test_a_stop_string_is_found_where_its_beginning_repeats() -> None:
    assert run(StopTable.build(VOCAB, "aab"), [0, 0, 0, 1]) == [False, False, False, True]


def test_a_character_spread_over_tokens_matches() -> None:
    assert run(StopTable.build(VOCAB, "bé"), [1, 10, 11]) == [False, False, True]


def test_tokens_without_text_leave_a_match_open() -> None:
    table = StopTable.build(VOCAB, "ab", size=20)
    assert run(table, [0, 8, 19, 1]) == [False, False, False, True]


def test_the_automaton_finds_what_a_search_finds() -> None:
    rng = random.Random(0)
    scan = jax.jit(lambda table, tokens: jax.lax.scan(table.advance, table.start(4), tokens)[1])
    word = lambda low, high: bytes(rng.choice(b"ab\n") for _ in range(rng.randint(low, high)))
    for _ in range(100):
        vocab = [word(0, 5) for _ in range(30)]
        stops = [word(1, 5).decode() for _ in range(rng.randint(1, 4))]
        table = StopTable.build(vocab, stops)
        tokens = np.array([[rng.randrange(30) for _ in range(40)] for _ in range(4)], np.int32)
        hits = np.asarray(scan(table, tokens.T)).T
        for row, hit in zip(tokens, hits, strict=True):
            text = b""
            for token, found in zip(row, hit, strict=True):
                old, text = len(text), text + vocab[token]
                assert found == (first_match(text, [s.encode() for s in stops], after=old) is not None)


def test_advance_maps_over_rows() -> None:
    table = StopTable.build(VOCAB, ["ab", "\n\n"])
    state, token = jnp.arange(4, dtype=jnp.int32) % 3, jnp.array([0, 1, 5, 7])
    whole, mapped = table.advance(state, token), jax.vmap(table.advance)(state, token)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()) and a.dtype == b.dtype, whole, mapped))


def test_other_stop_strings_do_not_retrace() -> None:
    advance = jax.jit(StopTable.advance)
    for stops in (["a"], ["\n\n", "def"], ["class Foo", "x" * 15]):
        table = StopTable.build(VOCAB, stops)
        advance(table, table.start(2), jnp.array([0, 1]))
    assert advance._cache_size() == 1


@pytest.mark.parametrize("length", [40, 200, 40_000])
def test_long_stop_strings_take_a_wider_table(length: int) -> None:
    string = "a" * (length - 1) + "b"
    table = StopTable.build(VOCAB[:2], string)
    assert table.next.dtype == {40: jnp.uint8, 200: jnp.uint16, 40_000: jnp.uint32}[length]
    state, hit = table.advance(jnp.array([length - 1, length - 2]), jnp.array([1, 0]))
    assert hit.tolist() == [True, False] and state.tolist() == [length, length - 1]


def test_a_large_vocabulary_keeps_a_small_table() -> None:
    rng = np.random.default_rng(0)
    vocab = [bytes(rng.integers(97, 123, n).astype(np.uint8)) for n in rng.integers(1, 9, 20_000)]
    table = StopTable.build(vocab, ["\n\n", "stop", "end"])
    assert table.next.shape == (32, 256) and table.columns.dtype == jnp.uint8


def test_the_string_completed_first_wins_and_then_the_longest() -> None:
    assert cut_at_stop("xabcd", ["abcd", "bc"]) == "xa"
    assert cut_at_stop("xabc", ["c", "abc", "bc"]) == "x"
    assert cut_at_stop("xabc", ["y"]) == "xabc"
    assert first_match("abab", ["ab"], after=2) == (2, 4)


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    assert held("text\n", ["\n\n", "text!"]) == 1
    assert held("textte", ["texttext"]) == 6
    assert held("ab", ["ab"]) == 0             # complete, so a matter of `first_match`
    assert held("ab", []) == 0


def test_wrong_stop_strings_are_refused() -> None:
    assert stop_strings(None) == () and stop_strings("ab") == ("ab",)
    with pytest.raises(ValueError, match="empty string"):
        stop_strings(["a", ""])
    with pytest.raises(TypeError, match="got 3"):
        stop_strings(["a", 3])                 # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one"):
        StopTable.build(VOCAB, [])


def steps(tok: Tokenizer, prompt: list[int], ids: list[int]) -> list[tuple[str, str]] | None:
    """What each token adds to the text by the `tokenizers` package, and the texts of special tokens; None where a
    character is cut, or what is added cannot be told."""
    special = {i: t.content for i, t in tok.backend.get_added_tokens_decoder().items() if t.special}
    out, before = [], tok.backend.decode(prompt)
    for n, token in enumerate(ids):
        now = tok.backend.decode([*prompt, *ids[:n + 1]])
        if not now.startswith(before) or "\ufffd" in now:
            return None
        out.append((now[len(before):], special.get(token, "")))
        before = now
    return out


def stopped(added: list[tuple[str, str]], stops: list[str], names: list[str]) -> tuple[int, str] | None:
    """By hand: how many tokens a row has that stops at its first match, and its text."""
    for n in range(1, len(added) + 1):
        text, found = "".join(a for a, _ in added[:n]), []
        for stop in stops:
            apart = any(name in stop for name in names)
            # the text that the string is sought in, and which of its letters are returned
            marks = [(c, not b) for a, b in added[:n] for c in (b if apart else "") or a]
            whole = "".join(c for c, _ in marks)
            at = whole.find(stop)
            if at >= 0:
                place = lambda end, marks=marks: sum(real for _, real in marks[:end])
                found.append((place(at + len(stop)), place(at)))
        if found:
            return n, text[:min(found)[1]]
    return None


@pytest.mark.parametrize("kind", [*KINDS, "letters"])
def test_a_row_stops_where_its_text_has_the_string(kind: str) -> None:
    """At the earliest token, on the device and on the host, behind prompts that begin no text and others."""
    tok, rng = Tokenizer((letters if kind == "letters" else KINDS[kind])()), random.Random(0)
    special = {i: t.content for i, t in tok.backend.get_added_tokens_decoder().items() if t.special}
    texts = ["a b", "ab cd  e f", "gh hh"] if kind == "letters" else [TEXTS[0], TEXTS[3], "é it"]
    prompts, compared, met = [[], [*special][:1], tok.encode(texts[0])[:4], [*special][:2]], 0, 0
    common = [i for text in texts for i in tok.encode(text)]
    find = jax.jit(lambda table, prompt, length, ids: jax.lax.scan(table.advance, table.begin(prompt, length), ids)[1])
    for turn in range(120):
        pool = [rng.choice(common) for _ in range(6)] + list(special)[:3] * (turn % 3)
        pool += [rng.randrange(len(tok))] * (turn % 2)
        prompt, ids = rng.choice(prompts), [rng.choice(pool) for _ in range(12)]
        if (added := steps(tok, prompt, ids)) is None:
            continue
        seen, written = "".join(a for a, _ in added), "".join(b or a for a, b in added)
        stops = []
        for text in rng.sample([seen, written, seen + " "], rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            stops.append(text[at:at + rng.randint(1, 9)] or " ")
        table = stop_table(tok, True, tuple(stops), len(tok))
        want = stopped(added, stops, list(special.values()))
        hits = find(table, jnp.array([(prompt + [0] * 4)[:4]]), jnp.array([len(prompt)]), jnp.array(ids)[:, None])
        first = np.asarray(hits)[:, 0].tolist()
        assert (first.index(True) + 1 if True in first else None) == (want and want[0]), (prompt, ids, stops)
        stream = tok.detokenizer(prompt, stop=stops)
        text, ends = "", None
        for n, token in enumerate(ids, 1):
            text += stream.feed([token])
            ends = ends or (n if stream.stopped else None)
        assert ends == (want and want[0]), (prompt, ids, stops)
        assert text + stream.finish() == (want[1] if want else seen), (prompt, ids, stops)
        compared, met = compared + 1, met + (want is not None)
    assert compared > 60 and compared > met > 30


def test_a_special_token_stops_at_its_text() -> None:
    tok = Tokenizer(letters())
    a, end, b = (tok.backend.token_to_id(x) for x in ("a", "<|end|>", "b"))
    for stops, ids, want in ((["<|end|>"], [a, end, b], (2, "a")), (["ba<|end|>"], [b, b, a, end], (4, "b")),
                             (["<|end|>b"], [a, end, b], (3, "a")), (["|>"], [a, end, b], None),
                             (["ab"], [a, end, b], (3, "")), (["a<|end|>", "b"], [b, end], (1, "")),
                             (["<|end|><s>"], [a, end, 0], (3, "a")), (["a<|end|>b"], [a, b, end], None)):
        table = stop_table(tok, True, tuple(stops), 20)
        hits = run(table, ids)
        assert (hits.index(True) + 1 if True in hits else None) == (want and want[0]), stops
        shown = tok.continuation([b], ids, stop=stops, include_stop=True)
        assert shown == (want[1] + stops[0] if want and stops != ["a<|end|>", "b"] else "b" if want else "ab")
        assert tok.continuation([b], ids, stop=stops) == (want[1] if want else "ab")


def test_strings_with_special_tokens_and_others_share_a_table_of_any_size() -> None:
    tok = Tokenizer(letters())
    assert stop_table(tok, True, ("a" * 300, "<|end|>" * 3, "b"), 20).next.shape[0] >= 300
    with pytest.raises(ValueError, match="stop: strings with special tokens in them and others take more than 16384"):
        stop_table(tok, True, ("a" * 1000, "a" * 1000 + "<|end|>"), 20)


@pytest.fixture(scope="module")
def spelled() -> LM:
    """A model that writes letters at random, in the fashion of Llama 2."""
    tok = Tokenizer(letters(), bos_id=0, eos_ids=[1])
    network = llama(vocab=20, width=32, layers=2, heads=4, kv_heads=2, mlp=48, context=256)
    return random_lm(Transformer(network), tokenizer=tok)


@pytest.mark.parametrize("prompt", often([""], ["", "a b"]))
@pytest.mark.parametrize("stop", often([" ", "a<|end|>"], [" ", " c", "<|end|>", "a<|end|>", [" d", "<|end|> b"]]))
def test_every_front_end_stops_there(spelled: LM, stop: str | list[str], prompt: str) -> None:
    given = dict(max_new_tokens=14, temperature=1.0, seed=1, suppress_tokens=[0, 1])
    free = dx.generate(spelled, prompt, num_samples=6, **given)
    tok, ids = spelled.tokenizer, spelled.tokenizer.encode(prompt)      # type: ignore[union-attr]
    held = dx.generate(spelled, prompt, num_samples=6, stop=stop, **given)
    drafted = dx.generate(spelled, prompt, num_samples=6, stop=stop, algorithm="prompt-lookup:length=3", **given)
    wants = []
    for i in range(6):
        added = steps(tok, ids, free.row(i).tolist())      # type: ignore[arg-type]
        assert added is not None
        want = stopped(added, [stop] if isinstance(stop, str) else stop, ["<s>", "</s>", "<|end|>"])
        wants.append(want or (14, free.text[i]))      # type: ignore[index]
        for out in (held, drafted):
            assert out.status[i] == (dx.Status.STOP if want else dx.Status.LENGTH)
            assert (int(out.lengths[i]), out.text[i]) == wants[i]      # type: ignore[index]
    stream = dx.stream(spelled, prompt, stop=stop, **given)
    assert "".join(stream) == wants[0][1] and stream.result is not None and stream.result.lengths[0] == wants[0][0]
    served = [one.result for one in dx.serve(spelled, [prompt], slots=2, stop=stop, **given)]
    assert served[0].text == [wants[0][1]] and served[0].lengths[0] == wants[0][0]
