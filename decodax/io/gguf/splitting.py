"""How byte-level BPE tokenizers split a text into words, by the names that GGUF files have for it.

A file names the rule of the model's tokenizer.json instead of holding it. Regular expressions are those of the models'
own files; each one splits the pieces that the ones before it left. llama.cpp splits by simpler ones where its regular
expressions lack a feature: `getUserName` stays whole by "kimi-k2", "youtu" and "tiny_aya", and combining marks are no
letters by "kimi-k2", "gpt-4o" and "tekken".
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


def _cased(upper: str, lower: str, digits: str = r"\p{N}{1,3}", after: str = r"[\r\n/]*") -> str:
    """Returns a rule that begins a word where a small letter is followed by a capital."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (rf"{before}{upper}*{lower}+{CONTRACTIONS}?|{before}{upper}+{lower}*{CONTRACTIONS}?|{digits}|"
            rf" ?[^\s\p{{L}}\p{{N}}]+{after}|{SPACES}")


GPT4O = _cased(UPPER, LOWER)
NO_HAN = r"&&[^\p{Han}]]"
KIMI = r"\p{Han}+|" + _cased(UPPER[:-1] + NO_HAN, LOWER[:-1] + NO_HAN, after=r"[\r\n]*")
SEED = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
BAILING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|"
           r"\s+")
DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
             r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
             rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}")
ASIAN = "[一-龥ࠀ-一가-퟿]+"
# The letters with a case that the model's file lists: not those of some scripts, and not those of mathematics.
CASED = (r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}"
         r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF2A}]]")
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$", ASIAN, r"\p{N}+")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}")
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
YOUTU = ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", _cased(UPPER, LOWER, r"\p{N}"))
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_RULES: dict[Splitting, str] = {
    Splitting((LLAMA3,), whole=True, begins=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Splitting((LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    Splitting((LLAMA3,), whole=True): "glm4 glm5",
    Splitting((QWEN2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    Splitting((r"[^\n]+|[\n]+", QWEN2)): "laguna",
    Splitting((QWEN35,)): "qwen35",
    Splitting((GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum",
    Splitting((r"\p{N}", GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    Splitting((TEKKEN,), whole=True, begins=True): "tekken",
    Splitting((GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2 talkie",
    Splitting((KIMI,), whole=True): "kimi-k2",
    Splitting(TINY_AYA): "tiny_aya cohere2moe",
    Splitting(YOUTU, whole=True): "youtu",
    Splitting((SEED,)): "seed-coder",
    Splitting((BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    Splitting(DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    Splitting(DEEPSEEK_LLM): "deepseek-llm",
    Splitting(DEEPSEEK_CODER): "deepseek-coder",
    Splitting((BLOOM,)): "bloom poro-chat gpt3-finnish",
    Splitting((BLOOM, r"\p{N}")): "viking",
    Splitting((r"\p{N}{1,3}", QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), whole=True): "minicpm5",
    Splitting(FALCON): "falcon",
    Splitting(DEFAULT): "default",
}
RULES = {name: rule for rule, names in _RULES.items() for name in names.split()}
"""The rules by their names in `tokenizer.ggml.pre`."""
