"""Questions on long texts, in the manner of RULER (Hsieh et al., 2024), which the shipped `recall` answers.

A text is filler with scattered facts. A fact is `name number number number number .`, where a name may have several
values or be another name for one (`name other .`), or `name [ words ]`. Questions follow the text, and their answers
end with `<|end|>`:

    recall  `? name`: the value of one of many names, which take up most of the text
    needle  `? name`: the same where nearly all of the text is filler
    values  `all name`: all three values of a name, in their order
    track   `? name`: a name for a name for a value; the answer follows the names to the value
    copy    `copy name`: 16 words word for word

Names, numbers and words are drawn anew for each text, so that nothing can be learnt by heart.

>>> problem = problems("needle", 1, length=24, seed=0)[0]
>>> len(problem.context.split()), problem.question.split()[0], len(problem.answer.split())
(24, '?', 4)
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np

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


class RecallQuestion(NamedTuple):
    """A question and its answer, each as words separated by spaces; the answer has no end token."""

    task: str
    question: str
    answer: str


class RecallProblem(NamedTuple):
    """A text with facts among filler, and a question about them with its right answer."""

    task: str
    question: str
    answer: str
    context: str

    @property
    def prompt(self) -> str:
        return f"{self.context} {self.question}"

    def correct(self, text: str) -> bool:
        """Returns True if an answer consists of exactly the words of the right one, in the same order. Only whitespace
        may differ."""
        return text.split() == self.answer.split()


class Scattered:
    """Facts that are to be scattered over a text, and the questions that they answer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.names = rng, rng.sample(NAMES, len(NAMES))
        self.chains: list[list[list[str]]] = []     # each in its own order
        self.questions: list[RecallQuestion] = []

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
        self.questions.append(RecallQuestion(task, " ".join(ask), " ".join(answer)))

    @property
    def size(self) -> int:
        return sum(len(fact) for chain in self.chains for fact in chain)

    def strewn(self, length: int) -> list[str]:
        """Returns a text of `length` words with all facts at random places among filler; facts that build on one
        another keep their order."""
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
        text = Scattered(random.Random(f"{task} {length} {seed} {i}"))
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
    """Returns a training example of `length + 1` tokens, a text with facts followed by questions and answers: the
    tokens, `i32[length + 1]`, and True for tokens of answers, which have a loss, `bool[length + 1]`."""
    text = Scattered(rng)
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
    """Returns a training example of random words for the first stage of training, in which spans of 3 to 11 words
    repeat earlier ones: `i32[length + 1]`, and True for tokens of repeated spans but the first of each, `bool[length +
    1]`."""
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
    """Returns the batch of a training step: tokens, `i32[rows, length + 1]`, and True for tokens that have a loss,
    `bool[rows, length + 1]`. Rows are made by `repeating_text` with `spans`, else by `training_text`."""
    text = repeating_text if spans else training_text
    texts = [text(length, random.Random(f"train {seed} {step} {row}")) for row in range(rows)]
    return np.stack([tokens for tokens, _ in texts]), np.stack([answers for _, answers in texts])
