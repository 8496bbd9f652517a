"""The time to the first token does not grow with the number of methods: plain decoding imports none of them."""

import subprocess
import sys

UNUSED = ("decodax.algorithms.speculative", "decodax.algorithms.diffusion", "decodax.algorithms.beams",
          "decodax.algorithms.contrastive", "decodax.caches", "decodax.search", "decodax.select", "decodax.train",
          "decodax.io.gguf", "decodax.io.drafters", "jinja2")


def test_plain_decoding_imports_no_other_method() -> None:
    program = ("import sys, decodax as dx\n"
               "dx.generate('pycode', 'def add(a, b):', max_new_tokens=1, temperature=0.8)\n"
               f"print([name for name in {UNUSED} if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
