import argparse
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decodax.cli import main
from decodax.cli.arguments import parser
from decodax.common.registry import SHELVES

Run = Any


@pytest.fixture
def generate(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `decodax generate` on the tiny model: exit code, standard output, standard error."""
    def run(*args: str) -> tuple[int, str, str]:
        code = main(["generate", "--model", str(tiny_model), "--max-new-tokens", "12", *args])
        return code, *capsys.readouterr()

    return run


def as_json(generate: Run, *args: str) -> dict[str, Any]:
    code, out, err = generate("--json", *args)
    assert code == 0, err
    return json.loads(out)


def test_the_text_goes_to_standard_output_and_the_figures_to_standard_error(generate: Run) -> None:
    code, out, err = generate("def f(")
    assert code == 0
    assert out.endswith("\n")
    assert "tokens/s" in err
    assert "tokens per forward" in err
    assert generate("def f(", "--quiet") == (0, out, "")
    assert generate("def f(", "--quiet", "--echo")[1] == "def f(" + out


def test_json_is_one_object_with_what_was_streamed(generate: Run) -> None:
    report = as_json(generate, "def f(")
    assert report["text"][0].rstrip("\n") == generate("def f(")[1].rstrip("\n")
    assert len(report["tokens"][0]) == report["stats"]["new_tokens"][0] == 12
    assert report["status"] == ["length"]
    assert "logprobs" not in report


def test_logprobs_are_those_of_the_tokens(generate: Run) -> None:
    noted = as_json(generate, "def f(", "--logprobs", "3")["logprobs"]
    assert [len(x) for x in noted["top_ids"][0]] == [3] * 12
    assert noted["raw"][0] == pytest.approx([max(x) for x in noted["top"][0]])      # greedy


def test_the_prompt_comes_from_an_argument_a_file_or_standard_input(
        generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt").write_text("né", encoding="utf-8")
    want = as_json(generate, "né")
    assert want["prompt"] == "né"
    for args in (["--file", str(tmp_path / "prompt")], ["--file", "-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO("né"))
        assert as_json(generate, *args)["tokens"] == want["tokens"]


@pytest.mark.full
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(generate: Run) -> None:
    warm = ["a b a b a b", "--temperature", "0.9", "--top-k", "20", "--seed", "3"]
    plain = as_json(generate, *warm)
    fast = as_json(generate, *warm, "--algorithm", "prompt-lookup:length=3,max_ngram=2")
    assert fast["tokens"] == plain["tokens"]
    assert fast["stats"]["drafted"][0] > 0
    assert as_json(generate, *warm, "--algorithm", "ngram")["text"] == fast["text"]


@pytest.mark.wide
def test_a_cache_policy_is_chosen_by_name(generate: Run) -> None:
    args = ["a b a b a b a b a b a b a b a b", "--max-new-tokens", "12"]
    everything = as_json(generate, *args)
    assert as_json(generate, *args, "--cache", "sink-window:budget=400")["tokens"] == everything["tokens"]
    assert as_json(generate, *args, "--cache", "sink-window:budget=6")["tokens"] != everything["tokens"]


def test_constraints_and_rules_are_given_as_strings(generate: Run) -> None:
    args = ["a", "--temperature", "1", "--max-new-tokens", "6", "--constraint", "regex:[0-9]{2}"]
    out = as_json(generate, *args, "--select", "mbr:greedy=true", "--num-samples", "2")
    assert len(out["text"]) == 1 and re.fullmatch("[0-9]{2}", out["text"][0])
    assert len(out["findings"]["texts"][0]) == 2


@pytest.mark.full
def test_a_context_comes_before_the_prompt(generate: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b a b a b a b a b ")
    whole = as_json(generate, "a b a b a b a b a b c a b", "--max-new-tokens", "8")
    assert as_json(generate, "c a b", "--context", str(tmp_path / "text"), "--max-new-tokens", "8")["tokens"] == \
        whole["tokens"]


def listed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["list", *args]) == 0
    return capsys.readouterr().out


def test_everything_that_has_a_name_is_listed(capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = listed(capsys)
    assert listed(capsys, "select") == listed(capsys, "selects") and listed(capsys, "search") != shown
    for name, shelf in SHELVES.items():
        assert set(re.findall(r"\S+", shown)) >= set(shelf), name
    assert {"pycode", "sums"} < set(shown.split())
    assert max(map(len, shown.splitlines())) <= 100 and len(shown.splitlines()) <= 80


def test_all_listings_show_names_and_one_listing_says_what_each_does(capsys: pytest.CaptureFixture[str],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown, line = listed(capsys), re.compile(r"^snapkv .*latest queries.* approximate$", re.MULTILINE)
    assert re.search(r"^evict +snapkv  h2o  ", shown, re.MULTILINE) and "approximate" not in shown
    assert line.search(listed(capsys, "caches")) and line.search(listed(capsys, "--family", "evict"))


def test_a_listing_fits_the_columns_that_a_pipe_is_given(capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        for args in ([], ["caches"]):
            assert width - 20 < max(map(len, listed(capsys, *args).splitlines())) <= width


def test_a_listing_has_options_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = {entry["name"]: entry for entry in json.loads(listed(capsys, "caches", "--json"))}
    assert found["h2o"]["options"]["budget"].endswith("default 1024") and found["h2o"]["guarantee"] == "approximate"
    family = json.loads(listed(capsys, "algorithms", "--family", "parallel-jacobi", "--json"))
    assert {entry["family"] for entry in family} == {"parallel-jacobi"}


def test_an_entry_is_shown_with_its_paper_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    shown = listed(capsys, "snapkv")
    assert "SnapKV: LLM Knows What You are Looking for" in shown and "kernel_size: a whole number from 1" in shown


def test_a_model_is_shown_by_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    shown = listed(capsys, "pycode")
    assert "A Llama-shaped language model for Python source" in shown and 'dx.load("pycode")' in shown
    assert "Loads a shipped model" not in shown and "name_or_dir" not in shown
    models = {entry["name"]: entry for entry in json.loads(listed(capsys, "models", "--json"))}
    assert models["recall"]["summary"].endswith("in the manner of RULER (Hsieh et al. 2024)")
    assert {entry["guarantee"] for entry in models.values()} == {""}


def test_samples_are_printed_under_headings(generate: Run) -> None:
    args = ["x", "--temperature", "1", "--num-samples", "3"]
    texts = as_json(generate, *args)["text"]
    assert len(set(texts)) == 3
    out = generate(*args)[1]
    assert [f"=== sample {i}: length ===\n{text}" in out for i, text in enumerate(texts, 1)] == [True] * 3


def test_text_ends_before_a_stop_string(generate: Run) -> None:
    text = as_json(generate, "def f(")["text"][0]
    stop = text[3:5]
    report = as_json(generate, "def f(", "--stop", "never", "--stop", stop)
    assert report["text"] == [text[:text.index(stop)]]
    assert report["status"] == ["stop"]
    assert generate("def f(", "--stop", stop, "--quiet")[1].rstrip("\n") == text[:text.index(stop)].rstrip("\n")


def test_ends_of_texts_are_shown_on_request(generate: Run) -> None:
    text = as_json(generate, "def f(")["text"][0]
    stop = text[3:5]
    kept = as_json(generate, "def f(", "--stop", stop, "--include-stop")
    assert kept["text"] == [text[:text.index(stop) + len(stop)]] and kept["status"] == ["stop"]
    force = ["def f(", "--set", 'logit_bias={"1": 1000}']
    assert as_json(generate, *force)["text"] == [""]
    assert as_json(generate, *force, "--special-tokens")["text"] == ["<|im_start|>" * 12]


def test_a_limit_on_time_ends_a_text(generate: Run) -> None:
    report = as_json(generate, "def f(", "--max-new-tokens", "60", "--max-time", "0.000001")
    assert report["status"] == ["time"] and 0 < len(report["tokens"][0]) < 60


def test_the_models_own_number_of_samples_is_made(tiny_model: Path, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    path = shutil.copytree(tiny_model, tmp_path / "several")
    (path / "generation_config.json").write_text(json.dumps({"num_return_sequences": 3, "max_new_tokens": 12}))
    for args, count in ([], 3), (["--num-samples", "2"], 2):
        assert main(["generate", "x", "--model", str(path), "--temperature", "1", *args]) == 0
        assert capsys.readouterr().out.count("=== sample") == count


def test_set_passes_any_other_argument(generate: Run) -> None:
    free = as_json(generate, "x")["tokens"][0]
    others = as_json(generate, "x", "--set", f"suppress_tokens={free[:2]}", "--set", "min_length=5")["tokens"][0]
    assert len(others) == 12
    assert not set(free[:2]) & set(others)


def test_a_chat_goes_through_the_template(generate: Run) -> None:
    plain = as_json(generate, "<system>s\n<user>hi\n<assistant>")
    assert as_json(generate, "hi", "--chat", "--system", "s")["tokens"] == plain["tokens"]


@pytest.mark.parametrize(("args", "message"), [
    (["x", "--file", "y"], "give one of them"),
    (["x", "--system", "y"], "--system goes with --chat"),
    (["x", "--logprobs", "1"], "--logprobs goes with --json"),
    (["x", "--algorithm", "prompt-lookup:width=3"],
     "algorithm: 'prompt-lookup' takes no option 'width'; takes length=10, max_ngram=3"),
    (["x", "--algorithm", "prompt-lookup:length=0"], "length: got 0"),
    (["x", "--cache", "snapvk"], "cache: unknown name 'snapvk'; near ones: snapkv"),
    (["x", "--cache", "snapkv:budget=8"], "budget: got 8, takes more than the 32 tokens"),
    (["x", "--cache", "snapkv:budget=abc"], "budget: got 'abc', takes a number of tokens from 1, a share of the text"),
    (["x", "--cache", "snapkv:window_size=abc"], "window_size: got 'abc', takes a whole number"),
    (["x", "--algorithm", "prompt-lookup:length=abc"], "length: got 'abc', takes a whole number"),
    (["x", "--algorithm", "prompt-lokup"], "unknown name 'prompt-lokup'; near ones: prompt-lookup"),
    (["x", "--set", "top_k"], "takes NAME=VALUE"),
    (["x", "--set", "top_k=many"], "takes a JSON value"),
    (["x", "--set", "nonsense=1"], "nonsense"),
    (["x", "--set", "seed=3"], "--seed is where that goes"),
    (["x", "--top-p", "0.5", "--set", "top_p=0.6"], "--top-p is where that goes"),
    (["x", "--seed", "-1"], "seed: got -1"),
    (["x", "--max-new-tokens", "1000000000"], "of memory"),
    (["x", "--top-p", "3"], "top_p: got 3.0, takes a number in [0, 1]"),
    (["x", "--set", "do_sample=false", "--temperature", "0.7"], "temperature: got 0.7 with do_sample=False"),
    (["x", "--set", "callback=1"], "callback: unknown argument; stream takes adapter, "),
    (["x", "--stop", ""], "stop: got an empty string"),
    (["x", "--num-samples", "0"], "num_samples: got 0"),
])
def test_wrong_usage_is_code_2_and_says_what_is_wrong(generate: Run, args: list[str], message: str) -> None:
    code, out, err = generate(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("args", "meant"), [
    (["generate", "x", "--temprature", "1"], "--temperature"), (["generate", "x", "--temprature=1"], "--temperature"),
    (["batch", "--inptu", "x"], "--input"), (["compare", "prompt-lookup", "--repaets", "2"], "--repeats"),
    (["plan", "--modle", "llama-3-8b"], "--model"), (["score", "x", "--lnies"], "--lines"),
    (["eval", "--taks", "x"], "--tasks"), (["quantize", "pycode", "out", "--wieghts", "int8"], "--weights"),
    (["list", "--familly", "x"], "--family"), (["list", "--jsno"], "--json"),
    (["info", "--jsno"], "--json"), (["--versoin"], "--version")])
def test_a_misspelt_flag_names_the_near_one(args: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    name = next(arg for arg in args if arg.startswith("--")).partition("=")[0]
    assert re.match(rf"decodax( \w+)?: error: {name}: unknown flag; did you mean {meant}\b", last)


@pytest.mark.parametrize(("name", "said"), [("genrate", "did you mean generate?"), ("zzz", "takes generate, list")])
def test_a_misspelt_command_names_the_near_one(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "x"])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"decodax: error: {name}: unknown command; {said}")


def test_flags_may_be_cut_short_and_values_may_look_like_flags(generate: Run) -> None:
    assert generate("--max-new", "2", "--stop=--temprature", "--", "--temprature")[0] == 0


def test_every_line_of_an_error_has_the_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", str(tmp_path)]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert err[0].startswith(f"decodax: error: {tmp_path}: has no config.json, which a Hugging Face model")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["generate", "x", "--model", str(tmp_path)]) == 1
    assert all(line.startswith("decodax: error: ") for line in capsys.readouterr().err.splitlines())


def test_no_prompt_at_a_terminal_is_wrong_usage(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, _, err = generate()
    assert code == 2
    assert "no prompt" in err


def test_an_unknown_flag_or_choice_is_code_2(generate: Run) -> None:
    for args in (["x", "--nonsense"], ["x", "--seed", "a"]):
        with pytest.raises(SystemExit) as error:
            generate(*args)
        assert error.value.code == 2


def test_failure_is_code_1_with_a_traceback_only_for_debug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", str(tmp_path)]) == 1
    assert "config.json" in (err := capsys.readouterr().err)
    assert "Traceback" not in err
    assert main(["generate", "x", "--model", "pycod", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    assert main(["generate", "--file", str(tmp_path / "binary")]) == 1
    assert "not UTF-8" in capsys.readouterr().err
    assert main(["generate", "--file", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err


def test_info_names_versions_devices_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"decodax", "jax", "flax"} <= set(report["versions"])
    assert len(report["devices"]) == 8
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert report["versions"]["jax"] in out
    assert all(model["name"] in out for model in report["models"])
    assert "at most 1.32 bits/byte" in out and "99% right" in out


def test_the_help_of_each_model_names_gguf_files() -> None:
    nothing = lambda args: None
    top = parser(nothing, nothing, nothing)
    commands = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction)).choices
    named = {f"{command} {action.dest}": str(action.help) for command, own in commands.items()
             for action in own._actions if action.dest in ("model", "draft")}
    assert len(named) >= 10
    assert not [name for name, text in named.items() if "GGUF file" not in text and "named as --model" not in text]


def test_help_comes_without_jax() -> None:
    code = ("import sys, decodax.cli\ntry: decodax.cli.main(['generate', '--help'])\n"
            "finally: assert 'jax' not in sys.modules and 'numpy' not in sys.modules")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "examples:" in out
    assert "exit codes:" in out


def start(tiny_model: Path, *args: str) -> subprocess.Popen[bytes]:
    # a job that a script started in the background ignores interrupts, and hands that on to its children
    program = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
               "from decodax.cli import main; sys.exit(main())")
    command = [sys.executable, "-c", program, "generate", "x", "--model", str(tiny_model), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.full
def test_a_closed_pipe_ends_it_quietly(tiny_model: Path) -> None:
    process = start(tiny_model, "--max-new-tokens", "400", "--quiet")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.wide
def test_an_interrupt_is_code_130(tiny_model: Path) -> None:
    process = start(tiny_model, "--max-new-tokens", "20000")      # far more than it makes before the signal
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in err
    assert b"Traceback" not in err
