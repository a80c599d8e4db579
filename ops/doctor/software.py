"""Python, the packages beside what they are pinned to, torch, and the accelerator."""

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import zip_longest
from typing import Any

from ops.doctor.finding import Finding, fail, ok, warn

TORCH_TIMEOUT_S = 120.0
DRIVER_TIMEOUT_S = 20.0
OLDEST_PYTHON = (3, 11)
# Run in a child: importing torch takes seconds and more memory than all the rest of the command line.
ASK_TORCH = """
import json, torch
cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "cards": cards,
                  "instructions": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}))
"""


def check_python() -> Finding:
    """The interpreter."""
    found = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    if sys.version_info < OLDEST_PYTHON:
        return fail("python", found, "3.11 or newer is needed")
    if platform.system() != "Linux":
        return fail("python", found, "the daemon runs on Linux")
    return ok("python", found)


def check_packages(distribution: str = "downcore") -> Finding:
    """Every package that the installed project asks for, beside the versions that it takes."""
    try:
        wanted = requires(distribution) or []
    except PackageNotFoundError:
        return fail("packages", f"{distribution} is not installed", "install it: make setup, or pip install its wheel")
    wrong = [problem for line in wanted if "extra ==" not in line and (problem := _problem(line))]
    if wrong:
        return fail("packages", "; ".join(wrong), "install with the pins: pip install -c constraints.txt")
    return ok("packages", f"{sum('extra ==' not in line for line in wanted)} packages as {distribution} wants them")


def check_torch_and_cards() -> Iterator[Finding]:
    """What torch says of itself, and whether it sees the cards that the driver sees."""
    told = ask_torch()
    cards = driver_cards()
    if isinstance(told, str):
        yield fail("torch", told, "install the torch of constraints.txt")
    else:
        build = f"CUDA {told['cuda']}" if told["cuda"] else "CPU build"
        yield ok("torch", f"{told['version']}, {build}, {told['instructions']}, {told['threads']} threads")
    if cards is None:
        yield ok("gpu", "none: there is no NVIDIA driver here, the daemon runs on the CPU")
    elif isinstance(cards, str):
        yield warn("gpu", cards, "see what nvidia-smi says; a container needs the device and the driver's libraries")
    elif not isinstance(told, str) and not told["cards"]:
        why = "is built for CPUs" if not told["cuda"] else "cannot use them"
        yield warn(
            "gpu", f"{', '.join(cards)}, and torch {why}", "install a CUDA build of torch: TORCH_SPEC in the Makefile"
        )
    else:
        yield ok("gpu", ", ".join(cards))


def ask_torch() -> dict[str, Any] | str:
    """Its version and what it can use; in words why it does not say."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"torch was not imported in {TORCH_TIMEOUT_S:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"importing torch ended with code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def driver_cards() -> list[str] | str | None:
    """Cards by name and memory; None without a driver; in words where the driver fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi does not answer"
    if done.returncode:
        return f"nvidia-smi failed: {(done.stdout + done.stderr).strip().splitlines()[-1:] or ['no reason given']}"
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [f"{row[0]} ({row[2]} of {row[1]} free, driver {row[3]})" for row in rows if len(row) == 4]


def satisfies(installed: str, specifiers: str) -> bool:
    """Whether a version is within `>=2,<2.4`. A build's own part, `+cpu`, does not count."""
    have = _numbers(installed)
    for specifier in filter(None, (part.strip() for part in specifiers.split(","))):
        operator, wanted = re.match(r"(==|>=|<=|!=|<|>|~=)\s*(.*)", specifier).groups()  # type: ignore[union-attr]
        order = _compare(have, _numbers(wanted))
        holds = {"==": order == 0, ">=": order >= 0, "<=": order <= 0, "!=": order != 0, "<": order < 0, ">": order > 0}
        if not holds.get(operator, order >= 0):
            return False
    return True


def _problem(requirement: str) -> str | None:
    """What is wrong with one requirement, `name>=1,<2`."""
    match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)", requirement)
    assert match is not None, requirement
    name, specifiers = match[1], match[2]
    try:
        installed = version(name)
    except PackageNotFoundError:
        return f"{name} is missing"
    return None if satisfies(installed, specifiers) else f"{name} is {installed}, and {specifiers.strip()} is wanted"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text.split("+", 1)[0])]


def _compare(left: list[int], right: list[int]) -> int:
    for a, b in zip_longest(left, right, fillvalue=0):
        if a != b:
            return -1 if a < b else 1
    return 0
