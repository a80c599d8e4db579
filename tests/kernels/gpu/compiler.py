"""A pytest plugin: kernels are compiled for sm_90 where they are called, on a machine without a GPU, and not launched.

`machine_code()` collects what the wrappers called inside it would have launched. Triton's own wheel has the assembler
and the disassembler, which say what a kernel takes and which instructions it is made of.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST_SHARED_BYTES = 232_448  # that one block of an sm_90 may have
MOST_REGISTERS = 65_536  # of one multiprocessor, so of one block
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One compiled kernel."""

    name: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread; more than none means that registers were spilled
    shared_bytes: int
    num_warps: int
    instructions: Counter[str]  # by the first part of the mnemonic

    def check(self, most_stack_bytes: int) -> None:
        """Raises AssertionError where the kernel would not start on an sm_90, or spills more than this a thread."""
        assert self.shared_bytes <= MOST_SHARED_BYTES, f"{self.name}: {self.shared_bytes:,} bytes of shared memory"
        assert self.stack_bytes <= most_stack_bytes, f"{self.name}: {self.stack_bytes} bytes of stack a thread"
        spills = {op: self.instructions[op] for op in ("LDL", "STL") if self.instructions[op]}
        assert not spills or most_stack_bytes, f"{self.name}: {spills}"
        assert self.registers * self.num_warps * 32 <= MOST_REGISTERS, f"{self.name}: {self.registers} registers"


@dataclass(slots=True)
class Collected:
    """Kernels in the order of their first calls."""

    kernels: list[MachineCode] = field(default_factory=list)

    def of(self, name: str) -> MachineCode:
        """The one kernel of this name."""
        (found,) = (kernel for kernel in self.kernels if kernel.name == name)
        return found


class NoDevice(DriverBase):
    """Enough of a driver for the compiler: an sm_90 that has no memory."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        pass

    @classmethod
    def is_active(cls) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"

    def get_current_target(self) -> GPUTarget:  # pyright: ignore[reportIncompatibleMethodOverride]
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing is measured here")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


_collecting: list[Collected] = []
_inspected: dict[str, MachineCode] = {}  # by hash: many calls compile the same kernel
_original_run: Any = JITFunction.run


def _compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    kernel = _original_run(self, *args, grid=grid, warmup=True, **kwargs)
    if _collecting:
        if kernel.hash not in _inspected:
            _inspected[kernel.hash] = inspect_kernel(kernel)
        _collecting[-1].kernels.append(_inspected[kernel.hash])
    return kernel


def inspect_kernel(kernel: Any) -> MachineCode:
    """What the assembler made of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    # Instructions stand behind their address in a comment, and a predicate in front of some.
    mnemonics = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]\s+)?([A-Z][A-Z0-9_]*)", code)
    return MachineCode(
        name=kernel.metadata.name,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        instructions=Counter(mnemonics),
    )


@contextmanager
def machine_code(most_stack_bytes: int = 0) -> Generator[Collected]:
    """Collects the kernels that are called inside, and checks each of them at the end."""
    collected = Collected()
    _collecting.append(collected)
    try:
        yield collected
    finally:
        _collecting.remove(collected)
    assert collected.kernels, "no kernel was called"
    for kernel in collected.kernels:
        kernel.check(most_stack_bytes)


def pytest_configure(config: pytest.Config) -> None:
    driver.set_active(NoDevice())
    JITFunction.run = _compile_only
