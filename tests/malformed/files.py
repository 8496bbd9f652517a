"""Broken files of a model directory, and command lines with a wrong value."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decodax as dx
from decodax.cli import main
from decodax.engine.request import Request
from decodax.io.text import Tokenizer
from tests.malformed.case import IDS, Case, World


def files(rng: random.Random) -> Case:
    name = rng.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
                       "config.json", "chat_template.jinja"])
    cut, at, byte = rng.random() * 0.98, rng.random(), rng.randrange(256)
    whole: dict[str, list[bytes]] = {
        "tokenizer.json": [b'{"model": 3}', b'{"version": "1.0"}'],
        "tokenizer_config.json": [b'{"eos_token": 3}', b'{"chat_template": [{"name": "default"}]}',
                                  b'{"chat_template": 3}', b'{"bos_token": {"text": "a"}}', b'{"pad_token": []}'],
        "generation_config.json": [b'{"eos_token_id": "a"}', b'{"temperature": "x", "do_sample": true}',
                                   b'{"max_new_tokens": 1.5}', b'{"num_beams": 4}', b'{"top_p": 7, "do_sample": true}',
                                   b'{"eos_token_id": [1, "x"]}', b'{"stop_strings": [1]}', b'{"max_length": []}',
                                   b'{"eos_token_id": 99999}', b'{"num_return_sequences": -1}'],
        "special_tokens_map.json": [b'{"pad_token": 5}'], "config.json": [b'{"model_type": "nope"}', b"{}"],
        "chat_template.jinja": [b"{% for %}", b"{{ 1 / 0 }}", b"{{ raise_exception('no') }}", b"{% if x %}",
                                b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"]}
    kind = rng.choice(["cut", "bytes", "type", "utf-8", "empty", "deep", "entry"])

    def spoiled(content: bytes) -> bytes:
        match kind:
            case "cut":
                return content[:max(1, int(len(content) * cut))]
            case "bytes":
                i = int(len(content) * at)
                return content[:i] + bytes([byte]) + content[i + 1:]
            case "type":
                return b"[1, 2]" if name != "chat_template.jinja" else b"{{ messages.append(1) }}"
            case "utf-8":
                return b"\xff\xfe" + content
            case "empty":
                return b"" if name != "chat_template.jinja" else b"{{ nothing.at.all }}"
            case "deep":
                return b"[" * 100_000 if name != "chat_template.jinja" else b"{{ " + b"(" * 5000
        return wrong

    wrong = rng.choice(whole[name])

    def run(w: World) -> Any:
        path = w.directory / name
        before = path.read_bytes()
        path.write_bytes(spoiled(before))
        try:
            if name not in ("generation_config.json", "config.json"):
                tok = Tokenizer.from_dir(w.directory)
                return tok.encode("ab"), tok.encode_chat([{"role": "user", "content": "x"}])
            return Request.read(dx.load(w.directory), IDS).prompts
        finally:
            path.write_bytes(before)

    # a changed byte may make another good file
    either = kind == "bytes" or (name == "special_tokens_map.json" and kind == "cut")
    origin = {"generation_config.json": "generation config", "config.json": "config.json"}.get(name, name)
    return Case(f"{name}: {kind} {wrong if kind == 'entry' else ''!r:.40}", run, (name, origin, "configuration"),
                (lambda w, out: True) if either else None, either)


def command_lines(rng: random.Random) -> Case:
    args, name = rng.choice([
        (["--top-p", "3"], "top_p"), (["--top-p", "x"], "--top-p"), (["--seed", "-1"], "seed"),
        (["--seed", "1.5"], "seed"),
        (["--max-new-tokens", "-3"], "max_new_tokens"), (["--max-new-tokens", "9" * 12], "max_new_tokens"),
        (["--num-samples", "0"], "num_samples"), (["--temperature", "nan"], "temperature"), (["--stop", ""], "stop"),
        (["--algorithm", "nope"], "nope"), (["--algorithm", "prompt-lookup:x=1"], "prompt-lookup"),
        (["--set", "batch=3"], "batch"), (["--set", "seed=3"], "--seed"), (["--set", "top_k=1.5"], "top_k"),
        (["--set", "bad_words_ids=[1]"], "bad_words_ids"), (["--set", "max_length=0"], "max_length"),
        (["--set", "temperature"], "--set"), (["--set", "x=" + "[" * 100_000], "--set"),
        (["--max-time", "0"], "max_time"),
        (["--logprobs", "-1", "--json"], "logprobs"), (["--min-new-tokens", "-1"], "min_new_tokens"),
        (["--set", "transforms=[1]"], "transforms"), (["--set", "batch_size=0"], "batch_size"),
        (["--set", "prompts=1"], "prompts"), (["--dtype", "int8"], "--dtype"), (["--set", "eos_token_id=\"x\""], "eos"),
        (["--set", "num_beams=0"], "num_beams"), (["--set", "skip_special_tokens=1"], "--special-tokens")])
    prompt = rng.choice(["x", "def f("])

    def run(w: World) -> None:
        code, error = w.cli(["generate", prompt, *args])
        assert code == 2 and "Traceback" not in error, error
        raise ValueError(error)

    return Case(f"decodax generate {' '.join(args):.60}", run, (name,))


def command_line(directory: Path, capture: Any) -> Callable[[list[str]], tuple[int, str]]:
    """Runs the command line on the model in `directory`: exit code and standard error."""
    def run(args: list[str]) -> tuple[int, str]:
        try:
            code = main([*args, "--model", str(directory)])
        except SystemExit as end:       # of argparse
            code = int(end.code or 0)
        return code, capture.readouterr().err

    return run


def stripped(directory: Path) -> None:
    """Gives a model directory all the files that cases break."""
    for name in ("special_tokens_map.json", "generation_config.json", "tokenizer_config.json"):
        if not (directory / name).exists():
            (directory / name).write_text(json.dumps({}))
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
