"""Published models, and texts and chats on which real GGUF files are compared with llama.cpp; always the same ones."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

import decodax as dx
from scripts.real_models import MODELS, folder

PARTS = (
    "The quick brown fox jumps over the lazy dog.", "It's 3.14159, they'd said; WE'LL see, won't we?",
    "café naïve Ünïcödé",
    "日本語のテキストと漢字", "中文文本，标点。", "한국어 텍스트", "العربية نص", "हिन्दी पाठ",
    "ไทยข้อความ", "emoji 🙂🚀👩‍👩‍👧‍👦 🇫🇷",
    "def f(x):\n    return x ** 2  # square\n", "for (int i = 0; i < n; ++i) { a[i] <<= 1; }\n",
    "\tif x:\n\t\tpass\n",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\\n\"}}", "SELECT * FROM t WHERE a != 'b' AND c >= 10;",
    "https://example.com/path?q=1&r=2#frag", "user@example.com", "    four spaces", "trailing spaces   ",
    "a  b   c    d",
    "\n\n\nlines\n\n", "\r\nwindows\r\n", "1234567890 12 345 6,789.00", "x=1;y=2;z=3", "<div class=\"a\">&amp;</div>",
    "$\\frac{a}{b} \\leq \\sum_{i=0}^{n} x_i$", "…“quotes” — dashes – ‘single’",
    "\u00a0non-breaking\u200bzero width", "ﬁ ligature ½ ² ™",
    "ALL CAPS AND camelCase and snake_case and kebab-case", "don't can't I'm you're he's we've she'd they'll",
    "\x00\x01control\x7f",
    "a", " ", "", "\n", "\t", ".", "é", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "🙂", "▁literal", "Ġliteral", "<0x0A>", "ᚠᛇᚻ runes", "Ω≈ç√∫˜µ≤≥÷",
)
SPECIAL = ("<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>", "a<|im_end|>b", "<bos>x<eos>",
    "<start_of_turn>user\nHi<end_of_turn>\n",
           "<|im_start|>  spaced  <|im_end|>", "<unused5>", "<file_sep>x", "<pad><unk>", "<|not_a_token|>")

HARD = (
    "It's 3.14159, they'd said; WE'LL see!", "1234567890 12 345 6,789.00 ½ ²x １２３", "getUserName", "iPhone",
    "日本語のテキストと漢字abc漢字", "中文文本，标点。「引用」…！", "한국어 텍스트 ㄱㄴ", "ㄅㄆㄇ ︰﹏",
    "ไทยข้อความ हिन्दी पाठ", "العربية، نص۔ ١٢٣", "emoji 🙂🚀👩‍👩‍👧‍👦 🇫🇷", "café naïve Ünïcödé ÀÉ",
    "Բարեւ ქართული Ⴀⴀ 𝔘𝐀 ꞐꬰꞋ", "fooBarBAZ DŽdž ʰʼ", "\tif x:\n\t\tpass\n", "\n\n\nlines\n\n  \n", "\r\nwindows\r\n",
    "a  b   c    d   ", " ", "    ", "\n", "\u3000full\u3000。", "\u00a0hard\u200bzero", "x=1;y=2//z\n/end",
    "a(b|c)[d]{e}", "…“quotes” — ‘single’ ~～", "don't can't I'M y'all 'twas")
"""Texts at whose boundaries rules of splitting differ."""


def texts() -> list[str]:
    """Returns 200 texts: single parts, special tokens, and mixtures."""
    draw = random.Random(38)
    found = [*PARTS, *SPECIAL]
    while len(found) < 200:
        some = draw.choices(PARTS + SPECIAL[:4] if len(found) % 4 == 0 else PARTS, k=draw.randint(2, 6))
        found.append(draw.choice(("", " ", "\n", "  ")).join(some))
    return found


QUESTIONS = (
    "What is the capital of France?", "Write a haiku about the sea.", "What is 17 plus 25?",
    "Name three primary colours.",
    "Explain photosynthesis in one sentence.", "Translate 'good morning' into Spanish.", "Who wrote Hamlet?",
    "Write a Python function that reverses a string.", "What is the boiling point of water in Celsius?",
    "Give me a synonym for happy.", "How many days are in a leap year?", "Summarise the plot of Cinderella.",
    "What is the largest planet?", "List four animals that live in the sea.", "What does HTTP stand for?",
    "Tell me a short joke.", "What is the square root of 81?", "Why is the sky blue?", "Name a famous painter.",
    "What language is spoken in Brazil?", "How do I boil an egg?", "What is gravity?", "Write a limerick.",
    "What is the opposite of hot?", "Give one tip for learning to code.", "Which ocean is the deepest?",
    "What is a noun?", "Describe a sunset.", "How many legs has a spider?", "Suggest a name for a cat.")
"""Questions, each one a chat."""


@functools.cache
def loaded(name: str) -> Any:
    """A published model; without its file the test is skipped."""
    path = folder() / MODELS[name].file
    if not path.is_file():
        pytest.skip(f"{path} is missing: python scripts/real_models.py {name}")
    return dx.load(path)
