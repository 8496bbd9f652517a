"""Models in lm-evaluation-harness, against its own model of transformers on the same weights."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import decodax as dx
from decodax.bench.harness import HarnessLM, evaluate
from decodax.cli import main
from tests.matrix import often
from tests.small_tokenizers import byte_level, save, sentencepiece

CHAT = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}" \
       "{% if add_generation_prompt %}<assistant>{% endif %}"
WORDS = ["def", "fib", "(n)", " return", " n", " Héllo", " café", " 日本", ".", " don't", " 🦜", " - 1", "\n", "  "]


@pytest.fixture(scope="module", params=[pytest.param("byte-level", marks=pytest.mark.full), "sentencepiece"])
def both(request, tmp_path_factory):
    """The same directory read by us and by transformers."""
    backend = byte_level() if request.param == "byte-level" else sentencepiece()
    special = {"eos_token": "<|endoftext|>"} if request.param == "byte-level" else \
        {"eos_token": "</s>", "bos_token": "<s>"}
    ids = {name.replace("token", "token_id"): backend.token_to_id(text) for name, text in special.items()}
    path = save(backend, tmp_path_factory.mktemp("harness"), tokenizer_config={
        **special, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT})
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=backend.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=48, **ids)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
        if request.param == "sentencepiece":
            # no bytes beyond characters: transformers writes U+FFFD for whole characters among them, too
            model.lm_head.weight[-256:] = 0
    model.save_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", max_length=48)
    return HarnessLM(path, batch_size=4, progress=False), theirs, path


def texts(count: int, words: tuple[int, int], seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(WORDS, k=rng.randint(*words))).strip("\n") or "n" for _ in range(count)]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def test_log_likelihoods(both):
    """Also of empty contexts, contexts that end with a space, ends within a token, and what is longer than the
    model's positions."""
    ours, theirs, _ = both
    assert (ours.max_length, ours.prefix_token_id, ours.eot_token_id) == (
        theirs.max_length, theirs.prefix_token_id, theirs.eot_token_id)
    begins, ends = texts(20, (0, 14), 1), texts(20, (1, 4), 2)
    pairs = [*zip(begins, ends, strict=True), ("", " return"), ("def fib ", "fib(n)"), ("don", "'t"),
             *zip(texts(4, (60, 80), 3), ends[:4], strict=True)]
    asked = requests("loglikelihood", pairs)
    got, want = ours.loglikelihood(asked, disable_tqdm=True), theirs.loglikelihood(asked, disable_tqdm=True)
    np.testing.assert_allclose([p for p, _ in got], [p for p, _ in want], atol=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    # what greedy decoding writes is greedy
    begin = "def fib"
    context = ours.tok_encode(begin)
    written = dx.generate(ours.lm, [context], max_new_tokens=3).row(0).tolist()
    assert ours._loglikelihood_tokens([(None, context, written)])[0][1]


def test_continuations_that_merge_into_the_context_are_scored(both):
    """All cuts of a few texts: what is scored is never nothing, and with the context it is the whole text's tokens."""
    ours, theirs, _ = both
    merged = []
    for text in [*texts(12, (2, 5), 9), "fib  ", "def fib(n)"]:
        for at in range(1, len(text)):
            context, scored = ours._encode_pair(text[:at], text[at:])
            begun, rest = theirs._encode_pair(text[:at], text[at:])
            assert scored
            if rest and begun:
                assert (context, scored) == (begun, rest)
            elif text[:at].strip():
                merged.append((text[:at], text[at:]))
                whole = ours.tok_encode(text)
                assert (context + scored)[-len(whole):] == whole
    assert len(merged) > 5
    asked = [*merged, (merged[0][0], " otherwise")]
    scores = [total for total, _ in ours.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)]
    assert max(scores) < 0
    for (context, end), total in zip(merged[:3], scores, strict=False):
        head, tail = ours._encode_pair(context, end)
        logits = theirs.model(torch.tensor([head + tail])).logits[0, len(head) - 1:-1].log_softmax(-1)
        np.testing.assert_allclose(total, logits.gather(1, torch.tensor(tail)[:, None]).sum().item(), atol=1e-4)
    with pytest.raises(ValueError, match="a continuation without tokens"):
        ours.loglikelihood(requests("loglikelihood", [("def", "")]), disable_tqdm=True)


def test_rolling_log_likelihoods(both):
    ours, theirs, _ = both
    empty = [""] if len(ours.tok_encode("")) else []       # theirs divides by the number of windows
    asked = requests("loglikelihood_rolling", [(text,) for text in [*texts(6, (1, 12), 4), *texts(4, (60, 120), 5),
                                                                *empty]])
    got, want = (lm.loglikelihood_rolling(asked, disable_tqdm=True) for lm in (ours, theirs))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", often(["prompt-lookup:length=3"], [None, "prompt-lookup:length=3", "jacobi"]))
def test_generated_answers_are_those_of_lm_eval_with_transformers(both, algorithm):
    ours, theirs, _ = both
    lm = HarnessLM(ours.lm, algorithm=algorithm, batch_size=4, progress=False)
    end = ours.tokenizer.special_tokens["eos_token"]
    stops = [["\n", "fib"], ["e", end], [], "n"]
    contexts = [*texts(10, (2, 10), 6), *texts(2, (60, 80), 7)]
    asked = requests("generate_until", [(context, {"until": stops[i % 4], "max_gen_toks": 6 + i % 2, "do_sample": False,
                                                   "temperature": 0.0}) for i, context in enumerate(contexts)])
    got, want = lm.generate_until(asked, disable_tqdm=True), theirs.generate_until(asked, disable_tqdm=True)
    assert got == want
    assert len(set(got)) > 6 and lm.counts.texts == 12
    assert lm.counts.tokens_per_forward >= 1


def test_chats_are_the_same_texts(both):
    ours, theirs, _ = both
    chat = [{"role": "user", "content": "fib of n?"}, {"role": "assistant", "content": "Let me "}]
    for asks in (True, False):
        text = ours.apply_chat_template(chat, add_generation_prompt=asks)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=asks)
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    assert ours.chat_template(True) == theirs.chat_template(True)


def test_draws_and_reasonings(both):
    ours, *_ = both
    asked = requests("generate_until", [("def", {"until": [], "max_gen_toks": 12, "do_sample": True,
                                                 "temperature": 1.0})] * 4)
    got = ours.generate_until(asked)
    assert len(set(got)) == 4 and ours.generate_until(asked) == got
    # a stop string within the reasoning does not end it
    text = got[0]
    thought = HarnessLM(ours.lm, think_end_token=text[2], progress=False)
    answer = thought.generate_until(asked[:1])[0]
    assert answer == text.split(text[2])[-1].lstrip()


@pytest.mark.wide
def test_tasks_from_their_files(both, tmp_path, capsys, monkeypatch):
    """A task of one's own, run whole: the same figures as with the harness's model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    ours, theirs, path = both
    rows = [{"question": text.strip() + ":", "choices": ["return", "fib.", "café"], "gold": i % 3}
            for i, text in enumerate(texts(8, (2, 8), 8))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, more in (("choices", {"output_type": "multiple_choice", "doc_to_choice": "choices",
                                    "doc_to_target": "gold",
                                    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}),
                       ("words", {"output_type": "generate_until", "doc_to_target": "{{ choices[0] }}",
                                  "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
                                  "metric_list": [{"metric": "exact_match"}]})):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({
            "task": f"decodax_{name}", "dataset_path": "json", "test_split": "test", "doc_to_text": "{{ question }}",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}, **more}))
    tasks = ["decodax_choices", "decodax_words"]
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)       # the defaults take 6 s to find
    found = evaluate(path, tasks, batch_size=4, progress=False, algorithm="prompt-lookup",
                     options={"bootstrap_iters": 0, "task_manager": manager})
    want = lm_eval.simple_evaluate(theirs, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    for task in tasks:
        for name, value in want["results"][task].items():
            if isinstance(value, float) and not name.startswith("total"):
                assert found["results"][task][name] == value, name
        for a, b in zip(found["samples"][task], want["samples"][task], strict=True):
            assert a["arguments"] == b["arguments"]
    assert found["decodax"]["texts"] == 8
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path: manager)
    main(["eval", "--model", str(path), "--tasks", "decodax_words", "--include-path", str(tmp_path), "--json",
          "--output", str(tmp_path / "out.json"), "--limit", "4", "--gen-kwargs", '{"max_gen_toks": 3}'])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["decodax"]["texts"] == 4 and said["decodax"]["tokens"] <= 12 and "decodax_words" in said["results"]
    assert json.loads((tmp_path / "out.json").read_text())["results"] == said["results"]
    assert main(["eval", "--tasks", "gsm8", "--gen-kwargs", "{"]) == 2 and "not JSON" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"decodax_choice, which .* does not have; similar names are decodax_choices"):
        evaluate(ours, "decodax_choice", options={"task_manager": manager})


def test_answers_are_kept_as_they_come(both):
    ours, *_ = both
    kept = []
    lm = HarnessLM(ours.lm, batch_size=1, progress=False)
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda *args: kept.append(args)))
    asked = requests("generate_until", [(text, {"until": ["n"], "max_gen_toks": 2}) for text in texts(3, (1, 3), 9)])
    got = lm.generate_until(asked)
    assert sorted(kept, key=lambda each: each[1][0]) == sorted(
        (("generate_until", request.args, text) for request, text in zip(asked, got, strict=True)),
        key=lambda each: each[1][0])


def test_bad_arguments_are_refused_by_name(both, tmp_path: Path):
    ours, *_ = both
    for arguments, message in ((dict(batch_size=0), "batch_size: got 0"),
                               (dict(max_length="x"), "max_length: got 'x'")):
        with pytest.raises(ValueError, match=message):
            HarnessLM(ours.lm, **arguments)
    with pytest.raises(TypeError, match=r"dtype: got arguments of decodax.load"):
        HarnessLM(ours.lm, dtype="bfloat16")
    with pytest.raises(ValueError, match="max_gen_toks: got 48, takes less than max_length = 48"):
        ours.generate_until(requests("generate_until", [("n", {"until": [], "max_gen_toks": 48})]))
    with pytest.raises(TypeError, match="temperatur"):
        ours.generate_until(requests("generate_until", [("n", {"do_sample": True, "temperatur": 2, "max_gen_toks": 4,
                                                              "temperature": 1})]))
