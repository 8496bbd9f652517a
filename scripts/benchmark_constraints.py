"""What constraints cost: making their automata for a vocabulary of 150,000 tokens, and a round of decoding.

    python scripts/benchmark_constraints.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import decodax as dx
from decodax.constraints import TokenDfa
from decodax.constraints.schema import json_schema
from decodax.constraints.tokens import Trie

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
    """All bytes, and words of lengths as a tokenizer has them."""
    rng, letters = random.Random(0), b"etaoinshrdlucmfwypvbgkjqxzETAOIN0123456789_-\"{}:,."
    words: set[bytes] = set()
    while len(words) < size - 256:
        word = bytes(rng.choice(letters) for _ in range(rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 11])))
        words.add(word if rng.random() < 0.4 else b" " + word)
    return [bytes([i]) for i in range(256)] + sorted(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=150_000, help="of the vocabulary (default: 150,000)")
    parser.add_argument("--batch", type=int, default=8, help="rows of the rounds (default: 8)")
    parser.add_argument("--repeats", type=int, default=7, help="of each time (default: 7)")
    args = parser.parse_args()

    clock = time.perf_counter()
    trie = Trie.build(vocabulary(args.size))
    print(f"vocabulary of {args.size:,} tokens, once: {time.perf_counter() - clock:.2f} s")
    for name, schema in SCHEMAS.items():
        clock = time.perf_counter()
        language = json_schema(schema)
        middle = time.perf_counter()
        found = TokenDfa.build([language], trie, [0])
        print(f"{name}: {len(language)} states, {found.next.shape[1]} classes; "
              f"{middle - clock:.2f} s over bytes, {time.perf_counter() - middle:.2f} s over tokens")

    lm = dx.load("pycode")
    # the grammar lets the same texts through and needs a stack, so a matcher on the host is asked in each round
    ways: dict[str, dict[str, Any]] = {
        "free": {}, "constrained": dict(constraint=dx.constraints.regex(r"(?s).*")),
        "by a matcher on the host": dict(constraint=dx.constraints.grammar('start: text\ntext: | /(?s:.)/ text'))}
    options: dict[str, Any] = dict(max_new_tokens=128, min_new_tokens=128, temperature=1.0)
    prompts = ["def area(", "import ", "class A", "x = ["] * (args.batch // 4 or 1)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats + 1):       # the first compiles
        for name, way in ways.items():
            stats = dx.generate(lm, prompts, **options, **way).stats
            seconds[name].append(stats.seconds / stats.forwards)
    times = {name: statistics.median(found[1:]) * 1e3 for name, found in seconds.items()}
    print(f"a round of pycode, {len(prompts)} rows:")
    for name, each in times.items():
        print(f"  {name}: {each:.2f} ms ({each / times['free']:.3f})")


if __name__ == "__main__":
    main()
