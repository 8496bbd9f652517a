"""Analyzes XLA's optimized text of a compiled program: copies, collectives, memory traffic.

This text is all that a compile-only client gives. The tests use it to check that the cache is not copied, that replicas
do not wait for each other, and that a step reads little more than weights and cache.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
"""Opcodes that wait for other devices; their asynchronous forms end in "-start"."""
WAITING = {*COLLECTIVES, *(f"{c}-start" for c in COLLECTIVES)}

_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "while", "conditional", "call",
         "partition-id", "replica-id", "opt-barrier"}
_VIEWS = {"bitcast", "reshape", "transpose"}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array of an instruction's result.

    Attributes:
        type: the element type, such as "bf16".
        dims: the dimensions.
        bytes: the size in memory. A TPU stores arrays in tiles, which the layout describes, and pads them to whole
            tiles: an `f32[16,8,128]` with tiles of 8 x 128 has no padding, an `f32[16,1,128]` takes eight times the
            size of its elements.
        main: whether the array is in main memory; a TPU keeps some results in fast memory on the chip.
    """

    type: str
    dims: tuple[int, ...]
    bytes: int
    main: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of an HLO program.

    Attributes:
        name: the name, such as "fusion.3".
        opcode: the operation, such as "fusion".
        result: the arrays of the result; the leaves of a tuple in order.
        operands: names of the instructions whose results it takes.
        text: the whole line, with its attributes.
        root: True if its result is that of its computation.
    """

    name: str
    opcode: str
    result: tuple[Buffer, ...]
    operands: tuple[str, ...]
    text: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """Returns the name of the computation that an attribute such as "calls", "body" or "condition" refers to; None
        if the instruction has no such attribute."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return found.group(1) if found else None

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the computations of a conditional's branches."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        names = found.group(1).split(",") if found else [self.attribute("true_computation"),
                                                         self.attribute("false_computation")]
        return tuple(n.strip(" %") for n in names if n)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled HLO program.

    Attributes:
        computations: the instructions of each computation, in order, by name.
        entry: name of the computation that runs first.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def all(self) -> Iterator[Instruction]:
        """Yields each instruction of every computation once, those of loop bodies and fusions included."""
        for computation in self.computations.values():
            yield from computation.values()

    def inside(self, name: str) -> Iterator[Instruction]:
        """Yields the instructions of a computation and of all computations that it calls."""
        for x in self.computations[name].values():
            yield x
            called = re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", x.text)
            for other in (*called, *(x.branches if x.opcode == "conditional" else ())):
                yield from self.inside(other)

    def loops(self) -> list[Instruction]:
        """Returns the `while` instructions of the entry computation and of all computations that it calls."""
        return [x for x in self.inside(self.entry) if x.opcode == "while"]


def parse(text: str) -> Program:
    """Parses the text of `jax.stages.Compiled.as_text()`.

    >>> lines = "ENTRY %main (x: f32[2]) -> f32[2] {", "  %x = f32[2]{0} parameter(0)", "  ROOT %c = f32[2]{0} copy(%x)"
    >>> p = parse("\\n".join(lines))
    >>> [(i.opcode, i.operands, i.result[0].bytes) for i in p.all()]
    [('parameter', (), 8), ('copy', ('x',), 8)]
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        line = re.sub(r"/\*index=\d+\*/", "", line)
        if header := _HEADER.match(line):
            current = computations.setdefault(header.group(1), {})
            entry = header.group(1) if line.startswith("ENTRY") else entry
        elif current is not None and (start := _INSTRUCTION.match(line)):
            x = _instruction(start.group(1), line, line[start.end():])
            current[x.name] = x
    if not entry:
        raise ValueError("text: has no ENTRY computation, so it is not that of a compiled program")
    return Program(computations, entry)


def copies(program: Program, elements: int, within: str | None = None) -> list[Instruction]:
    """Returns the instructions that copy an array with `elements` elements, of any shape and layout: in the whole
    program, or in the computation `within` and those that it calls. Asynchronous moves between the memories of a chip
    do not count."""
    found = program.all() if within is None else program.inside(within)
    return [x for x in found if x.opcode in ("copy", "transpose") and math.prod(x.result[0].dims) == elements]


def collectives(program: Program, within: str | None = None) -> list[tuple[Instruction, list[list[int]]]]:
    """Returns the instructions that wait for other devices, each with the groups of devices that wait for each other.
    `within` is as in `copies`."""
    found = program.all() if within is None else program.inside(within)
    return [(x, _groups(x.text)) for x in found if x.opcode in WAITING]


def callbacks(program: Program) -> list[Instruction]:
    """Returns the instructions that exchange data with the host."""
    return [x for x in program.all() if x.opcode in ("infeed", "outfeed", "send", "recv")
            or (x.opcode == "custom-call" and "callback" in x.text)]


def rounds(program: Program, loop: Instruction) -> int | None:
    """Returns the number of iterations of a `while` whose condition compares a counter that starts at 0 with a
    constant; None for other conditions.

    >>> lines = ("%c (i: s32[]) -> pred[] {", "  %i = s32[] parameter(0)", "  %n = s32[] constant(32)",
    ...          "  ROOT %lt = pred[] compare(%i, %n), direction=LT", "}", "ENTRY %main (i: s32[]) -> s32[] {",
    ...          "  %i = s32[] parameter(0)", "  ROOT %w = s32[] while(%i), condition=%c, body=%b")
    >>> p = parse("\\n".join(lines))
    >>> rounds(p, p.computations["main"]["w"])
    32
    """
    condition = program.computations[loop.attribute("condition") or ""]
    root = next(x for x in condition.values() if x.root)
    if root.opcode != "compare" or "direction=LT" not in root.text:
        return None
    bounds = [re.search(r"\bconstant\((\d+)\)", condition[name].text) for name in root.operands]
    return next((int(b.group(1)) for b in bounds if b), None)


def total(program: Program, trips: Callable[[Instruction], int],
          value: Callable[[dict[str, Instruction], Instruction], int] = lambda computation, instruction: 1,
          within: str | None = None) -> int:
    """Returns the sum of a value over all instructions that one execution runs; by default their number.

    A conditional counts as its most expensive branch and a fused computation as one operation; tuples, views and waits
    do not count.

    Args:
        program: the compiled program.
        trips: the number of iterations of a `while` instruction.
        value: the value of an instruction, given the computation that contains it.
        within: the computation that is executed; None: the whole program.
    """
    def cost(name: str) -> int:
        computation = program.computations[name]
        out = 0
        for x in computation.values():
            if x.opcode == "while":
                out += trips(x) * cost(x.attribute("body") or "")
            elif x.opcode == "conditional":
                out += max(cost(b) for b in x.branches)
            elif x.opcode == "call":
                out += cost(x.attribute("to_apply") or "")
            elif x.opcode not in _FREE and not x.opcode.endswith("-done") and '"ConcatBitcast"' not in x.text:
                out += value(computation, x)
        return out

    return cost(within or program.entry)


def traffic(program: Program, trips: Callable[[Instruction], int],
            counted: Callable[[Buffer], bool] = lambda buffer: buffer.main) -> int:
    """Returns the bytes that one device moves to and from main memory in one execution.

    Like XLA's own "bytes accessed" it adds up what operations read and write (for a slice or gather only the part
    taken, for an update in place only the updated part), with two differences: arrays in fast memory on the chip do not
    count, so a weight that is prefetched there is read once; and the body of a loop counts once for each iteration.

    Args:
        program: the compiled program.
        trips: the number of iterations of a `while` instruction.
        counted: returns True for an array that counts.

    >>> lines = ("ENTRY %main (x: f32[2]) -> f32[2] {", "  %x = f32[2]{0} parameter(0)",
    ...          "  %s = ((), (), (f32[2]{0}, s32[4]{0:S(8)})) custom-call-start()", "  ROOT %c = f32[2]{0} copy(%x)")
    >>> traffic(parse("\\n".join((*lines, "}"))), lambda loop: 1)
    24
    """
    return total(program, trips, lambda computation, x: _moved(program, computation, x, counted))


def cycles(program: Program, trips: Callable[[Instruction], int]) -> int:
    """Returns XLA's own estimate of a TPU's clock cycles for one execution.

    It covers fused operations, but not collectives, scatters or waits for memory: use it to compare programs, not as a
    time.
    """
    def estimated(computation: dict[str, Instruction], x: Instruction) -> int:
        found = re.search(r'"estimated_cycles":"(\d+)"', x.text)
        return int(found.group(1)) if found else 0

    return total(program, trips, estimated)


def _moved(program: Program, computation: dict[str, Instruction], x: Instruction,
           counted: Callable[[Buffer], bool]) -> int:
    """Returns the bytes that one instruction reads and writes of the arrays that count."""
    if x.opcode.endswith("-start") and not x.operands:      # on another core of the chip; its operands come later
        return sum(b.bytes for b in x.result if counted(b))
    if x.opcode.endswith("-start"):       # the result repeats the operand; its second half is where the data goes
        source = computation[x.operands[0]].result
        rest = [b for b in x.result if b.dims]
        target = [b for b in rest if b.dims not in {s.dims for s in source}] or rest[:1]
        moved = sum(b.bytes for b in target)
        return moved * any(map(counted, source)) + sum(b.bytes for b in target if counted(b))
    moved = 0
    for i, name in enumerate(x.operands):
        operand = computation[name]
        if len(operand.result) == 1 and counted(operand.result[0]):
            moved += _read(program, computation, x, i)
    return moved + sum(w for w, b in zip(_written(program, computation, x), x.result, strict=True) if counted(b))


def _read(program: Program, computation: dict[str, Instruction], x: Instruction, i: int) -> int:
    """Returns the bytes that instruction `x` reads of its operand `i`."""
    full = computation[x.operands[i]].result[0].bytes
    if x.opcode in ("dynamic-slice", "gather", "slice"):
        return min(full, sum(b.bytes for b in x.result)) if i == 0 else full
    if x.opcode in ("dynamic-update-slice", "scatter") and i == 0:
        return 0
    if x.opcode == "fusion":
        inner = program.computations[x.attribute("calls") or ""]
        parameter = next(p for p in inner.values() if p.opcode == "parameter" and f"parameter({i})" in p.text)
        return min(full, _used(program, inner, parameter.name))
    return full


def _used(program: Program, computation: dict[str, Instruction], name: str) -> int:
    """Returns the number of bytes that the instructions of a fused computation read of the value `name`."""
    total = 0
    for x in computation.values():
        for i, operand in enumerate(x.operands):
            if operand == name:
                total += _used(program, computation, x.name) if _views(x) and not x.root \
                    else _read(program, computation, x, i)
    return total


def _views(x: Instruction) -> bool:
    """True if an instruction of a fused computation passes on its first operand unchanged.

    This includes a fusion within a fusion whose result shares the memory of its operand: it only changes the type of a
    packed array.
    """
    return x.opcode in _VIEWS or (x.opcode == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in x.text
                                  and len(x.operands) == 1)


def _written(program: Program, computation: dict[str, Instruction], x: Instruction) -> list[int]:
    """Returns the bytes that an instruction writes of each array of its result."""
    leaves = [x]
    if x.opcode == "fusion":
        computation = program.computations[x.attribute("calls") or ""]
        root = next(y for y in computation.values() if y.root)
        leaves = [computation[n] for n in root.operands] if root.opcode == "tuple" else [root]
    if len(leaves) != len(x.result):
        return [b.bytes for b in x.result]
    return [_update(computation, y) for y in leaves]


def _update(computation: dict[str, Instruction], x: Instruction) -> int:
    """Returns the number of bytes of a result that are new; for an update in place, those of the updated part."""
    while x.opcode in _VIEWS and x.operands:
        x = computation[x.operands[0]]
    if x.opcode in ("dynamic-update-slice", "scatter"):
        return computation[x.operands[1 if x.opcode == "dynamic-update-slice" else 2]].result[0].bytes
    return sum(b.bytes for b in x.result)


def _instruction(name: str, line: str, rest: str) -> Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, call = rest[:end], rest[end:].lstrip()
    opcode, _, arguments = call.partition("(")
    inside = arguments[:_closing("(" + arguments) - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, opcode, tuple(_buffers(shape)), operands, line, line.lstrip().startswith("ROOT "))


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes the first one."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i
    return len(text)


def _buffers(shape: str) -> Iterator[Buffer]:
    for kind, dims, layout in _ARRAY.findall(shape):
        sizes = tuple(int(n) for n in dims.split(",") if n)
        bits = re.search(r"\d+", kind)
        width = 1 if kind == "pred" else int(bits.group()) / 8 if bits else 0
        found = re.match(r"\{([\d,]+)", layout)
        order = tuple(int(n) for n in found.group(1).split(",")) if found else ()
        yield Buffer(kind, sizes, math.ceil(_padded(sizes, order, layout) * width), "S(" not in layout)


def _padded(sizes: tuple[int, ...], order: tuple[int, ...], layout: str) -> int:
    """Returns the number of elements that an array takes in memory, with the padding of its last tiles.

    Args:
        sizes: the dimensions.
        order: the dimensions' indices from the innermost outwards.
        layout: XLA's text of the layout.

    >>> _padded((16, 1, 100), (2, 1, 0), "{2,1,0:T(8,128)(2,1)}"), _padded((3, 5), (1, 0), "{1,0}")
    (16384, 15)
    """
    tile = re.search(r":T\(([\d,]+)\)", layout)
    outwards = [sizes[i] for i in order]
    if tile is None or not outwards:
        return math.prod(sizes)
    steps = [int(n) for n in tile.group(1).split(",")][::-1]
    outwards += [1] * (len(steps) - len(outwards))
    filled = [-(-n // step) * step for n, step in zip(outwards, steps, strict=False)]
    return math.prod((*filled, *outwards[len(steps):]))


def _groups(text: str) -> list[list[int]]:
    """Returns the groups of devices from any of XLA's notations.

    >>> _groups("replica_groups={{0,1},{2,3}}"), _groups("replica_groups=[2,2]<=[2,2]T(1,0)")
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    >>> _groups("replica_groups=mesh['a'=2,'b'=2] {'b'}"), _groups("source_target_pairs={{1,0},{3,2}}")
    ([[0, 1], [2, 3]], [[1, 0], [3, 2]])
    """
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text):
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", found.group(1))]
    if found := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _iota(found.group(1)).tolist()
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", text):
        axes, order, over = found.groups()
        names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", axes), strict=True)
        shape = [int(n) for n in sizes]
        devices = np.arange(math.prod(shape)) if order is None else _iota(order).reshape(-1)
        inner = [names.index(n) for n in re.findall(r"'(\w+)'", over)]
        outer = [i for i in range(len(shape)) if i not in inner]
        width = math.prod(shape[i] for i in inner)
        return devices.reshape(shape).transpose(*outer, *inner).reshape(-1, width).tolist()
    raise ValueError(f"no groups of devices in {text.strip()[:200]!r}")


def _iota(text: str) -> np.ndarray:
    """Parses a device list in iota notation, `[groups, size]<=[dims]T(permutation)`; without `<=` the dims are the
    shape."""
    numbers = lambda t: [int(n) for n in t.split(",")]
    found = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    if found is None:
        raise ValueError(f"no device list: {text!r}")
    shape, dims, order = found.groups()
    source = numbers(dims or shape)
    devices = np.arange(math.prod(source)).reshape(source)
    devices = devices.transpose(numbers(order)) if order else devices
    return devices.reshape(numbers(shape)) if dims else devices
