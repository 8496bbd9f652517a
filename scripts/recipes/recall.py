"""`recall`: a model that answers questions on long texts, in the manner of RULER (Hsieh et al., 2024).

A text is filler with scattered facts. A fact is `name number number number number .`, where a name may have several
values or be another name for one (`name other .`), or `name [ words ]`. Questions follow the text, and their answers
end with `<|end|>`:

    recall  `? name`: the value of one of many names, which take up most of the text
    needle  `? name`: the same where nearly all of the text is filler
    values  `all name`: all three values of a name, in their order
    track   `? name`: a name for a name for a value; the answer follows the names to the value
    copy    `copy name`: 16 words word for word

`scripts/evaluate.py caches` measures with them what cache policies lose. A seed decides the problems. Names, numbers
and words are drawn anew for each text, so that nothing can be learnt by heart.

To find a name again a model has to know which token preceded another. The biases of queries and keys, which Qwen2 has,
begin in the first layer as attention to the tokens just before (`looking_back`); without that, tens of millions of
tokens pass before anything is recalled.

>>> problem = problems("needle", 1, length=24, seed=0)[0]
>>> len(problem.context.split()), problem.question.split()[0], len(problem.answer.split())
(24, '?', 4)
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from decodax.bench.figures import markdown_table
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.train.language_model import WeightedAnswers, likeliest
from recipes.options import Options
from recipes.run import Recipe, llama_config, publish, word_tokenizer

SYLLABLES = [c + v for c in "bdfgklmn" for v in "aeio"]
NUMBERS = [f"{n:02}" for n in range(100)]
WORDS = """the a of and in to was he she it that on with his her for at by from they were said which had not but we you
all one out when there up their what so if would who them been then into more time could no like him some now over only
our how man very old before two other sea house day way long""".split()
WORDS = [word for word in dict.fromkeys(WORDS) if word != "all"]
NAMES = [name for name in map("".join, itertools.product(SYLLABLES[::2], SYLLABLES)) if name not in WORDS]
PERIOD, ASK, ALL, COPY, OPEN, CLOSE = ".", "?", "all", "copy", "[", "]"
END, PAD = "<|end|>", "<|pad|>"
VOCABULARY = [PAD, END, PERIOD, ASK, ALL, COPY, OPEN, CLOSE, *NUMBERS, *WORDS, *NAMES]
ID = {word: i for i, word in enumerate(VOCABULARY)}

SPAN = 16
"""Words of a copied span."""

STAGES = ((400, 64, 64), (350, 64, 64), (500, 128, 32), (1000, 256, 16), (1000, 512, 8), (450, 1024, 4),
          (500, 2048, 2))
"""Number of steps, length and number of their texts. In the first stage texts are spans that repeat, without questions.
"""

CONFIG = llama_config(len(VOCABULARY), model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=128,
                      num_hidden_layers=4, num_key_value_heads=2, intermediate_size=320, max_position_embeddings=2048)

INTRODUCTION = """A small Qwen2-shaped model that answers questions on long texts, in the manner of RULER (Hsieh et al.
2024). It is made to measure what cache policies lose: `python scripts/evaluate.py caches`. Its language is that of
`scripts/recipes/recall.py`."""


class Question(NamedTuple):
    """A question with its answer, as words with spaces between; the answer has no end token."""

    task: str
    question: str
    answer: str


class RecallProblem(NamedTuple):
    """A question on a text."""

    task: str
    question: str
    answer: str
    context: str

    @property
    def prompt(self) -> str:
        return f"{self.context} {self.question}"

    def correct(self, text: str) -> bool:
        """Returns True if an answer is right, word for word."""
        return text.split() == self.answer.split()


def tokenizer() -> Tokenizer:
    """Returns the tokenizer of whole words."""
    return word_tokenizer(ID, [PAD, END])


class _Text:
    """Facts that are to be scattered over a text, and the questions that they answer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.names = rng, rng.sample(NAMES, len(NAMES))
        self.chains: list[list[list[str]]] = []     # each in its own order
        self.questions: list[Question] = []

    def add(self, task: str) -> None:
        name, value = self.names.pop(), lambda count: self.rng.choices(NUMBERS, k=count)
        ask, answer = [ASK, name], []
        if task in ("recall", "needle"):
            answer = value(4)
            self.chains.append([[name, *answer, PERIOD]])
        elif task == "values":
            values = [value(2) for _ in range(3)]
            self.chains.append([[name, *each, PERIOD] for each in values])
            ask, answer = [ALL, name], list(itertools.chain(*values))
        elif task == "track":
            own, chain = value(4), [name, *(self.names.pop() for _ in range(self.rng.randint(1, 2)))]
            self.chains.append([[name, *own, PERIOD], *([b, a, PERIOD] for a, b in itertools.pairwise(chain))])
            ask, answer = [ASK, chain[-1]], [*chain[-2::-1], *own]
        else:
            ask, answer = [COPY, name], [OPEN, *self.rng.choices(WORDS, k=SPAN), CLOSE]
            self.chains.append([[name, *answer]])
        self.questions.append(Question(task, " ".join(ask), " ".join(answer)))

    @property
    def size(self) -> int:
        return sum(len(fact) for chain in self.chains for fact in chain)

    def strewn(self, length: int) -> list[str]:
        """Returns `length` words: the facts in random order among filler."""
        facts = sum(len(chain) for chain in self.chains)
        order = [i for i, chain in enumerate(self.chains) for _ in chain]
        self.rng.shuffle(order)
        following = [iter(chain) for chain in self.chains]
        filler = length - self.size
        cuts = sorted(self.rng.choices(range(filler + 1), k=facts))
        out: list[str] = []
        for start, end, i in zip([0, *cuts], [*cuts, filler], [*order, None], strict=True):
            out += self._filler(end - start)
            if i is not None:
                out += next(following[i])
        return out

    def _filler(self, count: int) -> list[str]:
        words = self.rng.choices(WORDS, k=count)
        words[11::12] = [PERIOD] * len(words[11::12])
        if words:
            words[-1] = PERIOD
        return words


TASKS = ("recall", "needle", "values", "track", "copy")
ANSWERED = ("recall", "needle", "track", "copy")
"""The tasks that the shipped `recall` has learned."""

_OTHERS = {"needle": ("needle", 3), "values": ("needle", 4), "track": ("track", 3), "copy": ("copy", 2)}
"""The other facts in the text of a problem: their task and number."""


def problems(task: str, count: int, length: int, seed: int = 0) -> list[RecallProblem]:
    """Returns `count` problems of a task, with texts of `length` words."""
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}, takes one of {', '.join(TASKS)}")
    out = []
    for i in range(count):
        text = _Text(random.Random(f"{task} {length} {seed} {i}"))
        text.add(task)
        if task == "recall":
            while text.size < 0.6 * length and len(text.names) > 1:
                text.add(task)
        else:
            other, times = _OTHERS[task]
            for _ in range(times if length >= 128 else 0):
                text.add(other)
        if text.size > length:
            raise ValueError(f"length: got {length}, takes at least {text.size} for {task}")
        out.append(RecallProblem(*text.questions[0], " ".join(text.strewn(length))))
    return out


def training_text(length: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a text followed by questions, `i32[length + 1]`, and True for those of answers,
    `bool[length + 1]`."""
    text = _Text(rng)
    share = rng.uniform(0.4, 0.85)              # of the text before the questions
    dense = rng.random() ** 2 * 0.9             # of that, facts
    weights = [rng.random() ** 2 for _ in TASKS]
    while not text.chains or (text.size < dense * share * length and len(text.names) > 4):
        text.add(rng.choices(TASKS, weights)[0])
    words = text.strewn(max(int(share * length), text.size))
    answers = [False] * len(words)
    while len(words) <= length:
        asked = rng.choice(text.questions)
        question, answer = asked.question.split(), asked.answer.split()
        words += [*question, *answer, END]
        answers += [False] * len(question) + [True] * (len(answer) + 1)
    return (np.array([ID[word] for word in words[:length + 1]], np.int32), np.array(answers[:length + 1]))


def repeating_text(length: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Returns random words in which spans of 3 to 11 repeat after gaps of any length, for the first stage. The answers
    are the repeated spans without their first words."""
    words, answers = list[int](), list[bool]()
    while len(words) <= length:
        count = rng.randint(3, 11)
        if again := len(words) > 6 and rng.random() < 0.5:
            start = rng.randrange(max(1, len(words) - count))
            words += words[start:start + count]
        else:
            words += [rng.randrange(ID[CLOSE] + 1, len(VOCABULARY)) for _ in range(count)]
        answers += [False] + [again] * (len(words) - len(answers) - 1)
    return np.array(words[:length + 1], np.int32), np.array(answers[:length + 1])


def training_batch(rows: int, length: int, seed: int, step: int, spans: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns the batch of a step, `i32[rows, length + 1]` and `bool[rows, length + 1]`: see `training_text`, or with
    `spans` `repeating_text`."""
    text = repeating_text if spans else training_text
    texts = [text(length, random.Random(f"train {seed} {step} {row}")) for row in range(rows)]
    return np.stack([tokens for tokens, _ in texts]), np.stack([answers for _, answers in texts])


def stage(step: int, longest: int) -> tuple[int, int, bool]:
    """Returns the length and the number of the texts of a step, and whether it belongs to the first stage."""
    ahead = sum(step >= end for end in itertools.accumulate(steps for steps, _, _ in STAGES))
    _, length, rows = STAGES[min(ahead, len(STAGES) - 1)]
    return min(length, longest), rows, ahead == 0


def looking_back(model: Transformer, params: Any, strength: float = 6.0) -> Any:
    """Sets the biases of queries and keys in the first layer so that head `i` attends to the token `1 + i % 3` before.
    """
    c = model.config
    turn = 10_000.0 ** (-np.arange(c.head_dim // 2) * 2 / c.head_dim)
    keys = np.concatenate([np.ones(c.head_dim // 2), np.zeros(c.head_dim // 2)])
    queries = [np.concatenate([np.cos(back * turn), -np.sin(back * turn)]) for back in
               (1 + head % 3 for head in range(c.heads))]
    own = params["layers"]["0"]["attn"]
    own["q"]["bias"] = jnp.asarray(strength * np.concatenate(queries), jnp.float32)
    own["k"]["bias"] = jnp.asarray(strength * np.tile(keys, c.kv_heads), jnp.float32)
    return params


def accuracy(model: Transformer, params: Any, task: str, count: int, length: int, seed: int = 1) -> float:
    """Returns the share of held-out problems of a task whose whole answer is right, greedily."""
    right = 0
    for problem in problems(task, count, length, seed):
        prompt = [ID[word] for word in problem.prompt.split()]
        answer = [*(ID[word] for word in problem.answer.split()), ID[END]]
        padded = np.zeros((1, -(-(length + 40) // 64) * 64), np.int32)
        padded[0, :len(prompt) + len(answer)] = [*prompt, *answer]
        got = np.asarray(likeliest(model, params, padded))[0, len(prompt) - 1:len(prompt) - 1 + len(answer)]
        right += got.tolist() == answer
    return right / count


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    model, longest = Transformer(read_config(CONFIG)), options.longest or 2048

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        lengths = [n for n in (512, 1024, 2000) if n <= longest]
        figures = {task: {n: accuracy(model, exact, task, options.problems or 1, n) for n in lengths} for task in TASKS}
        table = markdown_table(["task", *(f"{n} tokens" for n in lengths)],
                               [[task, *(f"{x:.0%}" for x in row.values())] for task, row in figures.items()])
        lengths_trained = ", ".join(map(str, dict.fromkeys(min(length, longest) for _, length, _ in STAGES)))
        facts |= {"lengths": lengths_trained, "accuracy": figures}
        publish(target, "recall", model, shipped, tokenizer(), facts, {"eos_token": END, "pad_token": PAD}, CONFIG,
                introduction=INTRODUCTION, tags=["long-context"], rows={
            "lengths of training texts": f"{lengths_trained} tokens",
            "training": f"AdamW, cross-entropy, context tokens at {WeightedAnswers.outside:g} of an answer's weight, "
                        "float32 master weights"},
            figures=f"Right answers on {options.problems} held-out problems a task, greedy, with the shipped weights "
                    f"in float32:\n\n{table}")
        return f"right answers\n{table}"

    def batch(run: Any) -> tuple[np.ndarray, np.ndarray]:
        length, rows, spans = stage(run.step, longest)
        return training_batch(rows, length, options.seed, run.step, spans)

    return Recipe(
        looking_back(model, model.init_params(jax.random.key(options.seed))), WeightedAnswers(model), batch,
        lambda batch: batch[0].shape[0] * (batch[0].shape[1] - 1),
        lambda params, run: {task: accuracy(model, params, task, 16, stage(run.step, longest)[0]) for task in TASKS},
        finish, shardings=model.shardings(mesh))
