"""Cost of constraints: making their automata for a vocabulary of 150,000 tokens, and a round of decoding."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import decodax as dx
from decodax.bench.figures import show_table
from decodax.bench.timing import in_turn, median
from decodax.constraints import TokenDfa
from decodax.constraints.schema import json_schema
from decodax.constraints.tokens import TokenTrie

TEXT = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "person": {"type": "object", "properties": {
        "name": TEXT, "age": {"type": "integer", "minimum": 0}, "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": TEXT}}, "required": ["name", "age"]},
    "order": {"type": "object", "properties": {
        **{f"field{i}": TEXT for i in range(12)},
        "items": {"type": "array", "items": {"type": "object", "properties": {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "price": {"type": "number", "minimum": 0},
            "quantity": {"type": "integer"}}, "required": ["sku", "quantity"]}},
        "date": {"type": "string", "format": "date-time"}}, "required": ["field0"]},
    "a text of at most 80 characters": {"type": "object", "properties": {
        "title": {"type": "string", "maxLength": 80}}, "required": ["title"]}}


def vocabulary(size: int) -> list[bytes]:
    """Returns all bytes, and random words as long as those of tokenizers."""
    rng, letters = random.Random(0), b"etaoinshrdlucmfwypvbgkjqxzETAOIN0123456789_-\"{}:,."
    words: set[bytes] = set()
    while len(words) < size - 256:
        word = bytes(rng.choice(letters) for _ in range(rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 11])))
        words.add(word if rng.random() < 0.4 else b" " + word)
    return [bytes([i]) for i in range(256)] + sorted(words)


def main(args: argparse.Namespace) -> None:
    """Times both and prints tables."""
    clock = time.perf_counter()
    trie = TokenTrie.build(vocabulary(args.size))
    rows = [(f"vocabulary of {args.size:,} tokens, once", "", "", "", f"{time.perf_counter() - clock:.2f}")]
    for name, schema in SCHEMAS.items():
        clock = time.perf_counter()
        language = json_schema(schema)
        middle = time.perf_counter()
        found = TokenDfa.build([language], trie, [0])
        rows.append((name, f"{len(language)}", f"{found.next.shape[1]}", f"{middle - clock:.2f}",
                     f"{time.perf_counter() - middle:.2f}"))
    show_table(("", "states", "classes", "s over bytes", "s over tokens"), rows)

    lm = dx.load("pycode")
    # the grammar accepts the same texts but needs a stack, so a matcher on the host is called in each round
    ways: dict[str, dict[str, Any]] = {
        "free": {}, "constrained": dict(constraint=dx.constraints.regex(r"(?s).*")),
        "by a matcher on the host": dict(
            constraint=dx.constraints.grammar('start: text\ntext: | /(?s:.)/ text'))}
    options: dict[str, Any] = dict(max_new_tokens=128, min_new_tokens=128, temperature=1.0)
    prompts = ["def area(", "import ", "class A", "x = ["] * (args.batch // 4 or 1)

    def round_time(way: dict[str, Any]) -> float:
        stats = dx.generate(lm, prompts, **options, **way).stats
        return stats.seconds / stats.forwards * 1e3

    times = in_turn({name: lambda way=way: round_time(way) for name, way in ways.items()}, args.repeats)
    show_table((f"a round of pycode, {len(prompts)} rows", "ms", "over free"),
               [(name, f"{median(x):.2f}", f"{median(x) / median(times['free']):.3f}") for name, x in times.items()])
