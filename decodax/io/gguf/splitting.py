"""How byte-level BPE tokenizers split a text into words, by the names that GGUF files have for it.

A file names the rule of the model's tokenizer.json instead of holding it. Regular expressions are those of the models'
own files; each one splits the pieces that the ones before it left.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Splitting:
    """A rule by which a byte-level BPE tokenizer splits a text into pieces before it merges their bytes to tokens.

    Attributes:
        patterns: regular expressions whose matches, and what lies between them, are pieces.
        whole: True if a piece that is a token is not spelled by merges.
        begins: True if texts begin with BOS unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = (rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
          rf"{SPACES}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|"
          rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}")
GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
         rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}")
SEED = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
BAILING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|"
           r"\s+")
DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
             r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
             rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_RULES: dict[Splitting, str] = {
    Splitting((LLAMA3,), whole=True, begins=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Splitting((LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    Splitting((QWEN2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    Splitting((QWEN35,)): "qwen35",
    Splitting((GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum",
    Splitting((r"\p{N}", GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    Splitting((TEKKEN,), whole=True, begins=True): "tekken",
    Splitting((GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    Splitting((SEED,)): "seed-coder",
    Splitting((BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    Splitting(DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    Splitting(DEEPSEEK_CODER): "deepseek-coder",
    Splitting(FALCON): "falcon",
    Splitting(DEFAULT): "default",
}
RULES = {name: rule for rule, names in _RULES.items() for name in names.split()}
"""The rules by their names in `tokenizer.ggml.pre`."""
