"""The peak memory of a load, in a process of its own."""

import subprocess
import sys
from pathlib import Path

LOAD = """
import sys, time
import jax
import decodax as dx

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

dx.load(sys.argv[1])                        # what programs and imports take is not counted
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
clock = time.perf_counter()
params = dx.load(sys.argv[2]).params
size = sum(x.nbytes for x in jax.tree.leaves(params))
print((status("VmHWM") - before) / size, size, time.perf_counter() - clock)
"""

MEASURED = Path("/proc/self/clear_refs").exists()
"""True where the system tells the peak: on Linux."""


def check_peak(kind: str, small: Path, large: Path, stored: int) -> None:
    """Asserts that loading a model holds at most 1.15 of its packed size, which is at most 1.15 of the file's.

    Args:
        kind: name of the case.
        small: a small model of the same kind, which is loaded first.
        large: the model.
        stored: size of its file in bytes.
    """
    made = subprocess.run([sys.executable, "-c", LOAD, small, large], check=True, capture_output=True, text=True)
    peak, size, seconds = map(float, made.stdout.split())
    print(f"{kind}: peak {peak:.3f} of {size / 1e6:.0f} MB, {size / stored:.3f} of the file, {seconds:.1f} s")
    assert peak < 1.15 and size < 1.15 * stored
