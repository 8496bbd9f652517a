import json
import random
from pathlib import Path

import pytest
import tokenizers
import transformers

from decodax.io.chat import render_chat
from decodax.io.messages import ChatTemplateError
from decodax.io.text import Tokenizer
from tests.small_tokenizers import CORPUS, KINDS, TEXTS, byte_level, save, sentencepiece, word_piece


@pytest.fixture(scope="module", params=KINDS)
def tok(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


def samples(tok: Tokenizer, count: int = 40) -> list[list[int]]:
    """Encoded texts, and random ids."""
    rng = random.Random(0)
    texts = [tok.encode(text) for text in TEXTS + CORPUS[:5]]
    return texts + [[rng.randrange(len(tok)) for _ in range(rng.randrange(8))] for _ in range(count)]


def test_decode_equals_the_backend(tok: Tokenizer) -> None:
    for ids in samples(tok):
        for skip in (True, False):
            want = tok.backend.decode(ids, skip_special_tokens=skip)
            # the backend replaces a run of fallback bytes with a broken character byte by byte, even the good ones
            if "\ufffd" not in want:
                assert tok.decode(ids, skip_special_tokens=skip) == want, ids


def test_a_continuation_is_what_the_whole_text_has_beyond_the_prompt(tok: Tokenizer) -> None:
    for ids in samples(tok):
        for cut in range(len(ids) + 1):
            before, whole = (tok.backend.decode(x) for x in (ids[:cut], ids))
            if "\ufffd" not in before and "\ufffd" not in whole and whole.startswith(before):
                assert tok.continuation(ids[:cut], ids[cut:]) == whole[len(before):]


def test_streamed_pieces_join_to_the_continuation(tok: Tokenizer) -> None:
    for ids in samples(tok):
        for cut in (0, len(ids) // 2):
            stream = tok.detokenizer(ids[:cut])
            text = "".join([stream.feed([i]) for i in ids[cut:]]) + stream.finish()
            assert text == tok.continuation(ids[:cut], ids[cut:])


def test_a_stream_never_shows_half_a_character() -> None:
    for tok in (Tokenizer(byte_level()), Tokenizer(sentencepiece())):
        ids = tok.encode("né 日本 🦜 ÿ")
        stream = tok.detokenizer()
        pieces = [stream.feed([i]) for i in ids]
        assert "".join(pieces) == "né 日本 🦜 ÿ" and stream.finish() == ""
        assert "" in pieces                    # some token brought only a part


def test_a_broken_character_is_replaced_when_it_cannot_be_completed() -> None:
    tok = Tokenizer(byte_level())
    parrot = tok.encode("🦜")
    stream = tok.detokenizer()
    assert stream.feed(parrot[:1]) == "" and stream.finish() == "\ufffd"
    assert tok.detokenizer().feed(parrot[:1] + tok.encode("a")) == "\ufffda"


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    tok = Tokenizer(byte_level())
    parrot = tok.encode("🦜")
    assert tok.continuation(parrot[:1], parrot[1:]) == "🦜"


def test_token_bytes_join_to_the_continuation_of_a_text(tok: Tokenizer) -> None:
    table, head = tok.token_bytes(), tok.encode("it")
    assert len(table) == len(tok)
    for ids in samples(tok):
        assert tok.continuation(head, ids) == b"".join(table[i] for i in ids).decode(errors="replace")


def test_special_tokens_have_no_bytes_and_other_added_tokens_do() -> None:
    tok = Tokenizer(byte_level())
    table = tok.token_bytes()
    assert table[tok.backend.token_to_id("<|im_start|>")] == b""
    assert table[tok.backend.token_to_id("<think>")] == b"<think>"
    assert tok.token_bytes(skip_special_tokens=False)[tok.backend.token_to_id("<|im_start|>")] == b"<|im_start|>"


def test_an_added_token_whose_id_another_token_has_is_what_decodes() -> None:
    """As in transformers; the backend numbers added tokens by the size of the vocabulary, which may have holes."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 3}, unk_token="a"))
    backend.add_tokens(["<tool>"])
    assert backend.token_to_id("<tool>") == 3
    assert Tokenizer(backend).decode([1, 3]) == transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend).decode([1, 3]) == "b <tool>"


def test_ids_beyond_the_vocabulary_add_nothing_and_negative_ones_are_refused() -> None:
    tok = Tokenizer(byte_level())
    assert tok.decode([*tok.encode("a"), len(tok), len(tok) + 70]) == "a"
    with pytest.raises(ValueError, match="got -1"):
        tok.decode([-1])


@pytest.mark.parametrize("min_new", [0, 3])
def test_text_ends_before_the_stop_string_that_is_completed_first(min_new: int) -> None:
    tok = Tokenizer(byte_level())
    rng = random.Random(1)
    alphabet = [tok.encode(c)[0] for c in "ab\n"] + tok.encode("🦜")
    for _ in range(300):
        ids = [rng.choice(alphabet) for _ in range(12)]
        stops = ["".join(rng.choice(["a", "b", "\n", "🦜"]) for _ in range(rng.randint(1, 3))) for _ in range(3)]
        table = tok.token_bytes()
        counted = len(b"".join(table[i] for i in ids[:min_new]))
        data = b"".join(table[i] for i in ids)
        ends = [(end, end - len(s.encode())) for s in stops for end in range(len(data) + 1)
                if data[:end].endswith(s.encode()) and end > counted]
        want = data[:min(ends)[1]] if ends else data
        stream = tok.detokenizer(stop=stops, min_new=min_new)
        pieces = [stream.feed([i]) for i in ids]
        assert "".join(pieces) + stream.finish() == want.decode(errors="replace")
        assert stream.stopped == bool(ends)
        assert tok.continuation([], ids, stop=stops, min_new=min_new) == want.decode(errors="replace")


def test_the_prompt_does_not_count_towards_a_stop_string() -> None:
    tok = Tokenizer(byte_level())
    assert tok.continuation(tok.encode("a"), tok.encode("bab"), stop="ab") == "b"


def test_special_ids_come_from_the_generation_config_before_the_tokenizer_config(tmp_path: Path) -> None:
    path = save(sentencepiece(), tmp_path, generation_config={"eos_token_id": [2, 7]}, config={"eos_token_id": 9},
                tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    tok = Tokenizer.from_dir(path)
    assert (tok.bos_id, tok.eos_ids, tok.pad_id) == (1, (2, 7), None)
    assert tok.encode("a")[0] == 1
    (path / "generation_config.json").unlink()
    assert Tokenizer.from_dir(path).eos_ids == (9,)
    (path / "config.json").unlink()
    assert Tokenizer.from_dir(path).eos_ids == (2,)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tok = Tokenizer.from_dir(save(backend, tmp_path))
    assert tok.decode(tok.encode("a longer text")) == "a longer text"


def test_a_missing_or_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"takes a tokenizer\.json, has no tokenizer file"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_decoder_that_cannot_work_token_by_token_is_refused() -> None:
    backend = word_piece()
    backend.decoder = tokenizers.decoders.BPEDecoder()
    with pytest.raises(ValueError, match="got a BPEDecoder part"):
        Tokenizer(backend).token_bytes()


CHATML = """{%- if messages[0]['role'] == 'system' %}
{{- messages[0].content }}
{%- endif %}
{% for message in messages if message.role != 'system' %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}
{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""

TOOLS = """{% set ns = namespace(n=0) %}{% if tools %}{% for tool in tools %}{% set ns.n = ns.n + 1 %}
{{ ns.n }}: {{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{% generation %}{{ m.content }}{% set ns.n = 0 %}{% endgeneration %}{{ m.name is defined }}{% endfor %}"""

CHAT = [{"role": "user", "content": " <Hello> & 'you' ", "name": None}, {"role": "assistant", "content": "Hé."},
        {"role": "user", "content": "Bye"}]
TOOL = [{"type": "function", "function": {"name": "né", "parameters": {"<b>": [1, 2.5, None, True]}}}]


@pytest.mark.parametrize("template", [CHATML, MISTRAL, TOOLS], ids=["chatml", "mistral", "tools"])
@pytest.mark.parametrize("opens", [True, False])
def test_chat_prompts_equal_those_of_transformers(template: str, opens: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    path = save(sentencepiece(), tmp_path, tokenizer_config=config)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    tok = Tokenizer.from_dir(path)
    options = {"tools": TOOL, "add_generation_prompt": opens}
    assert tok.chat_text(CHAT, **options) == oracle.apply_chat_template(CHAT, tokenize=False, **options)
    assert tok.encode_chat(CHAT, **options) == oracle.apply_chat_template(CHAT, return_dict=False, **options)


def test_template_files_come_before_the_configuration_and_are_found_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "with tools"}]
    path = save(byte_level(), tmp_path, tokenizer_config={"chat_template": named})
    (path / "chat_template.jinja").write_text("new")
    tok = Tokenizer.from_dir(path)
    assert tok.chat_text(CHAT) == "new"
    assert tok.chat_text(CHAT, tools=TOOL) == "with tools"
    assert tok.chat_text(CHAT, template="{{ bos_token is defined }}") == "False"


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="no default chat template"):
        Tokenizer(byte_level()).chat_text(CHAT)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('no system role') }}", "no system role"),
    ("{% if %}", "line 1"),
    ("{{ messages.append(1) }}", "append"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
])
def test_a_template_that_fails_or_leaves_the_sandbox_is_an_error(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, CHAT)


ADDED = {"content": "<|end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
         "special": True}
WORDS = "fib <|end|> n<|end|>\n<tool>n <img>  Né w<img>x"
ELSEWHERE = {
    "described": ({"eos_token": "<|end|>", "added_tokens_decoder": {
        0: ADDED, 1: {**ADDED, "content": "<tool>", "special": False, "lstrip": True},
        2: {**ADDED, "content": "<img>", "rstrip": True}}}, {}, {}),
    "described, and not said to be special": ({"eos_token": "<|end|>", "added_tokens_decoder": {
        0: {**ADDED, "special": False}}}, {}, {"<tool>": 1}),
    "added_tokens.json": ({"eos_token": "<|end|>"}, {}, {"<tool>": 1, "<|end|>": 0}),
    "special_tokens_map.json": ({"eos_token": "</s>"}, {"eos_token": {**ADDED, "lstrip": True}}, {"<|end|>": 0}),
    "named in the map alone": ({}, {"eos_token": {**ADDED, "rstrip": True}, "additional_special_tokens": ["<img>"]},
                               {}),
    "named alone": ({"eos_token": {"__type": "AddedToken", **ADDED}, "image_token": "<img>"}, {}, {}),
    "without a name": ({"eos_token": "<|end|>", "additional_special_tokens": ["<tool>", "<img>"]}, {}, {"<tool>": 0}),
    "named by the model": ({"eos_token": "<|end|>", "extra_special_tokens": {"tool": "<tool>"}}, {}, {}),
    "split": ({"eos_token": "<|end|>", "added_tokens_decoder": {0: ADDED, 1: {
        **ADDED, "content": "<tool>", "special": False}}, "split_special_tokens": True}, {}, {})}


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "unigram"])
@pytest.mark.parametrize("place", ELSEWHERE)
def test_tokens_of_other_files_are_those_of_transformers(kind: str, place: str, tmp_path: Path) -> None:
    """The numbers of the tokens stand for the first ids that tokenizer.json leaves free."""
    backend = KINDS[kind]()
    free = backend.get_vocab_size(with_added_tokens=True)
    config, named, added = ELSEWHERE[place]
    if "added_tokens_decoder" in config:
        config = {**config, "added_tokens_decoder": {str(free + i): entry for i, entry
                                                     in config["added_tokens_decoder"].items()}}
    backend.save(str(tmp_path / "tokenizer.json"))
    for file, content in (("tokenizer_config.json", config), ("special_tokens_map.json", named),
                          ("added_tokens.json", {text: free + i for text, i in added.items()})):
        if content:
            (tmp_path / file).write_text(json.dumps(content))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_dir(tmp_path)
    assert ours.eos_ids == (theirs.eos_token_id,)
    ids = theirs(WORDS)["input_ids"]
    assert ours.encode(WORDS) == ids
    assert theirs.eos_token_id in ids or "split" in place
    assert ours.decode(ids, skip_special_tokens=False) == ours.backend.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids) == ours.backend.decode(ids)
    described = lambda backend: {i: repr(token) for i, token in backend.get_added_tokens_decoder().items()}
    assert described(ours.backend) == described(theirs.backend_tokenizer)


def test_tokens_that_cannot_be_added_are_errors_that_name_the_file(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for config, message in (
            ({"added_tokens_decoder": {"900": ADDED}}, r"tokenizer_config.json: token '<\|end\|>': has id 900, but"),
            ({"added_tokens_decoder": {"x": ADDED}}, "tokenizer_config.json: added_tokens_decoder: takes"),
            ({"added_tokens_decoder": {"900": {"text": "a"}}}, "tokenizer_config.json: added_tokens_decoder: takes"),
            ({"additional_special_tokens": [3]}, "additional_special_tokens: got"),
            ({"split_special_tokens": "yes"}, "split_special_tokens: got 'yes'")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("none", [-1, -100, [-1], [-1, -2], None])
def test_negative_ids_mean_none(none: object, tmp_path: Path) -> None:
    backend = byte_level()
    backend.save(str(tmp_path / "tokenizer.json"))
    end = backend.token_to_id("<|endoftext|>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "pad_token_id": none, "bos_token_id": none}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [none, -1, 5] if none is not None
                                                                 and not isinstance(none, list) else none}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    ends = (5,) if isinstance(none, int) else (7,)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id) == (ends, None, None)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<|endoftext|>"}')
    assert Tokenizer.from_dir(tmp_path).pad_id == end


READS = {
    "m.thinking": "{% for m in messages %}{{ m.role }}:{% if m.thinking %}<{{ m.thinking }}>{% endif %}{{ m.content }};"
                  "{% endfor %}",
    "m['reasoning']": "{% for m in messages %}{{ m.role }}:{% if 'reasoning' in m %}<{{ m['reasoning'] }}>{% endif %}"
                      "{{ m.content }};{% endfor %}",
    "m.get": "{% for m in messages %}{{ m.role }}:{% if m.get('reasoning_content', '') %}"
             "<{{ m.get('reasoning_content') }}>{% endif %}{{ m.content }};{% endfor %}",
    "a namespace": "{% set ns = namespace(thinking='') %}{% for m in messages %}{% set ns.thinking = "
                   "m.reasoning_content if m.reasoning_content is defined else '' %}{{ m.role }}:{% if ns.thinking %}"
                   "<{{ ns.thinking }}>{% endif %}{{ m.content }};{% endfor %}",
    "parts": "{% for m in messages %}{{ m.role }}:{% if m.content is not string %}{% for part in m.content %}"
             "{{ part.thinking }}{% endfor %}{% else %}{% if m.reasoning %}<{{ m.reasoning }}>{% endif %}"
             "{{ m.content }}{% endif %};{% endfor %}"}


@pytest.mark.parametrize("template", READS.values(), ids=READS)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_by_the_name_that_it_reads(name: str, template: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "why"}]
    assert render_chat(template, messages) == "user:a;assistant:<why>b;"
    messages[1] |= {"reasoning": "one", "reasoning_content": "one", "thinking": "one"}
    assert render_chat(template, messages) == "user:a;assistant:<one>b;"
    del messages[1][name]
    assert render_chat(template, messages) == "user:a;assistant:<one>b;"


def test_reasoning_is_given_once_and_only_to_templates_that_read_it() -> None:
    both = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{{ thinking }}{% endfor %}"
    assert render_chat(both, [{"role": "assistant", "content": "", "thinking": "why"}], thinking="!") == "why!"
    assert render_chat(both, [{"role": "assistant", "content": "", "reasoning": "why"}], thinking="!") == "why!"
    every = "{% for m in messages %}{{ m.keys() | list }}{{ 'thinking' }}{% endfor %}"
    assert render_chat(every, [{"role": "assistant", "reasoning": "why"}]) == "['role', 'reasoning']thinking"
