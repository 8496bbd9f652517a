"""House rules: what imports what, and how large files and folders are. CONTRIBUTING.md says them in words."""

import ast
import collections
import functools
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1]

ROOMS = (
    "common", "pallas_kernels", "core", "cache", "models", "sampling", "caches", "io", "constraints", "sharding",
    "algorithms", "train", "engine", "front", "search", "select", "jobs", "contrib", "bench", "functions", "cli",
    "__main__",
)
"""The folders and single files of the package, the lowest first."""

FLOORS = 13
"""Rooms above one another at most, on the longest way of imports from the bottom to the top."""


LINES, FILES = 400, 30
"""Lines of a file, and files of a folder, at most."""



def modules() -> dict[str, Path]:
    """The files of the package by module name, as an installation has them."""
    found = {}
    for folder, package in (("decodax", "decodax"), ("models", "decodax.models"),
                            ("pallas_kernels", "decodax.pallas_kernels")):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = file
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each module imports of the package, wherever the import stands. The package itself, whose names are lazy, is
    left out."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in files else node.module
                          for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = (found & files.keys()) - {name, "decodax"}
    del graph["decodax"]
    return graph


def room(module: str) -> str:
    return module.split(".")[1]


def test_a_module_imports_only_from_its_room_and_those_below():
    wrong = [f"{name} imports {other}" for name, others in imports().items() for other in others
             if ROOMS.index(room(other)) > ROOMS.index(room(name))]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter(imports()).prepare()         # raises CycleError, which names the modules


def test_the_core_knows_no_method():
    low = ("common", "pallas_kernels", "core")
    assert all(room(other) in low for name, others in imports().items() if room(name) == "core" for other in others)


def test_the_house_has_few_floors():
    below: dict[str, set[str]] = {name: set() for name in ROOMS}
    for name, others in imports().items():
        below[room(name)] |= {room(other) for other in others} - {room(name)}
    floors: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        floors[name] = 1 + max((floors[other] for other in below[name]), default=0)
    assert max(floors.values()) <= FLOORS, floors


def sources(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_longer_than_it_may_be():
    found = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines())
             for file in sources("decodax", "models", "pallas_kernels", "scripts")}
    longer = {name: count for name, count in found.items() if count > LINES}
    assert not longer, f"divide these, at most {LINES} lines each: {longer}"


def test_no_folder_has_more_files_than_it_may_have():
    count = collections.Counter(file.parent.relative_to(ROOT).as_posix() for file in sources(
        "decodax", "models", "pallas_kernels", "scripts", "tests") if file.name != "__init__.py")
    assert not {folder: n for folder, n in count.items() if n > FILES}


def test_no_two_classes_of_the_library_have_one_name():
    places = collections.defaultdict(list)
    for file in sources("decodax", "models", "pallas_kernels"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, twice


FOREIGN = {
    "detach", "dtype", "ndim", "shape", "tolist", "weak_type", "committed", "__array__", "__len__",     # arrays
    "__annotations__", "__globals__", "__mro__", "__name__", "__self__", "__wrapped__",     # functions and classes
    "compute_capability",       # JAX's devices
    "ctx", "jinja_pass_arg",    # Jinja's nodes and filters
    "model_json_schema",        # pydantic's classes
    "to_dict",                  # configs of transformers
    "mallopt", "stderr",        # the C library, and errors of subprocess
}
"""Attributes that are probed on objects of other libraries and of Python."""

PLACES = {
    ("decodax/__init__.py", None),                                          # names of the package's own modules
    ("decodax/algorithms/speculative/drafts/self/self_speculative.py", "key"),      # paths of JAX's pytrees
    ("decodax/algorithms/speculative/drafts/self/self_speculative.py", "name"),
    ("decodax/cache/key_values.py", "name"),
    ("decodax/cache/recurrent.py", "key"),
    ("decodax/train/loop.py", "key"),
    ("decodax/train/masked_diffusion.py", "key"),
}
"""Files and the attributes that they probe on one kind of foreign object; None: names that are computed."""


def probes() -> set[tuple[str, str | None]]:
    """The calls `hasattr(x, name)` and `getattr(x, name, default)`, as pairs of a file and a name."""
    found = set()
    for file in sources("decodax", "models", "pallas_kernels"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (
                    node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
                found.add((file.relative_to(ROOT).as_posix(), name))
    return found


def test_capabilities_are_declared_and_not_probed():
    """An object of the library says by its base class or a declared field what it can do."""
    found = {(file, name) for file, name in probes() if name not in FOREIGN}
    assert not found - PLACES, "declare these in a base class"
    assert not PLACES - found, "these are probed no longer"
    assert not FOREIGN - {name for _, name in probes()}, "these are probed no longer"

RULES = {
    "snapkv": ("decodax/caches/evict/snapkv.py", ("WindowAttention", "pooled")),
    "quest": ("decodax/caches/sparse/quest.py", ("KeyBounds",)),
    "kivi": ("decodax/caches/quantize/kivi.py", ("affine_codes", "quantize_keys", "quantize_values", "dequantize_keys",
                                                 "dequantize_values", "_dequantize", "KIVICodec")),
    "token-recycling": ("decodax/algorithms/speculative/drafts/text/token_recycling.py", ("TokenRecycling", "_at")),
    "fast-dllm": ("decodax/algorithms/diffusion/samplers/fast_dllm.py", ()),
    "beam-search": ("decodax/algorithms/beams/beam_search.py", ("BeamStep",)),
}
"""Entries of the registry, with the file named after the paper and the classes and functions there that are its rule.
(): all of the file."""


def test_the_rule_of_a_paper_is_read_in_one_file():
    """It has under 80 lines beside docstrings, comments and blank lines."""
    for name, (file, parts) in RULES.items():
        tree = ast.parse((ROOT / file).read_text())
        texts = {node.lineno + i for part in ast.walk(tree) if isinstance(part, ast.FunctionDef | ast.ClassDef)
                 for node in part.body[:1] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                 for i in range(node.end_lineno - node.lineno + 1)}
        rule = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
                and (not parts or node.name in parts)]
        assert {*parts} <= {node.name for node in rule}, name
        lines = (ROOT / file).read_text().splitlines()
        count = sum(1 for node in rule for i in range(node.lineno, node.end_lineno + 1)
                    if i not in texts and lines[i - 1].strip() and not lines[i - 1].strip().startswith("#"))
        assert count < 80, f"{name}: {count} lines"
