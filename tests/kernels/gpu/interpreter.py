"""A pytest plugin: Triton's interpreter, mended so that bfloat16 and fp8 values are right.

The interpreter keeps these types as bits. Its own casts truncate and lose a carry, and a dot multiplies the bits as
integers. Here every cast goes through float32 with round to nearest even, a dot takes float32 values, and arithmetic on
bare bfloat16, which would be done on bits, is refused: kernels convert to float32 first.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

BITS_TYPES = {
    tl.bfloat16: (torch.bfloat16, np.uint16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8, torch.uint8),
}
ARITHMETIC = (
    *("fadd", "fsub", "fmul", "fdiv", "frem", "fma", "precise_divf", "clampf"),
    *("minimumf", "minnumf", "maximumf", "maxnumf"),
    *("exp", "exp2", "log", "log2", "sqrt", "precise_sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil"),
    *("fcmpOLT", "fcmpOGT", "fcmpOLE", "fcmpOGE", "fcmpOEQ", "fcmpONE"),
)


def decode(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The values of bits as the interpreter keeps them, float32."""
    if dtype not in BITS_TYPES:
        return data.astype(np.float32)
    wide, bits, raw = BITS_TYPES[dtype]
    return torch.from_numpy(np.array(data, dtype=bits)).view(raw).view(wide).float().numpy()


def encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 to the nearest value of a type; fp8 saturates, as the hardware's conversion does."""
    if dtype not in BITS_TYPES:
        return values.astype(interpreter._get_np_dtype(dtype))
    wide, bits, raw = BITS_TYPES[dtype]
    tensor = torch.from_numpy(np.array(values, dtype=np.float32))
    if wide.itemsize == 1:
        most = torch.finfo(wide).max
        tensor = tensor.clamp(-most, most)
    return tensor.to(wide).view(raw).numpy().astype(bits, copy=False)


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: object) -> np.ndarray:
    return encode(decode(data, source), target)


def _mended_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(builder: object, source: interpreter.TensorHandle, target: tl.dtype) -> interpreter.TensorHandle:
        have, want = source.dtype.scalar, target.scalar
        if have == want or (have not in BITS_TYPES and want not in BITS_TYPES):
            return original(builder, source, target)
        return interpreter.TensorHandle(encode(decode(source.data, have), want), want)

    return cast


def _mended_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(builder: object, a: Any, b: Any, acc: Any, *rest: object) -> interpreter.TensorHandle:
        assert acc.dtype.scalar not in BITS_TYPES, "a dot accumulates in float32"
        a, b = (interpreter.TensorHandle(decode(x.data, x.dtype.scalar), tl.float32) for x in (a, b))
        return original(builder, a, b, acc, *rest)

    return dot


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(builder: object, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, interpreter.TensorHandle) and arg.dtype.scalar in BITS_TYPES:
                raise TypeError(f"{name} on {arg.dtype}: convert to float32 first")
        return original(builder, *args, **kwargs)

    return refuse


def _with_bools(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Masks that came of a comparison with a number are wider than a bool, which Triton 3.9 refuses."""

    def call(builder: object, *args: Any, **kwargs: Any) -> Any:
        mask = args[place]
        if isinstance(mask, interpreter.TensorHandle):
            mask.data = mask.data.astype(bool)
        return original(builder, *args, **kwargs)

    return call


def mend() -> None:
    """Replaces the interpreter's casts, dot, and what takes masks, once a process."""
    builder: Any = interpreter.InterpreterBuilder
    interpreter._convert_float = _convert
    builder.cast_impl = _mended_cast(builder.cast_impl)
    builder.create_dot = _mended_dot(builder.create_dot)
    builder.create_masked_load = _with_bools(builder.create_masked_load, 1)
    builder.create_masked_store = _with_bools(builder.create_masked_store, 2)
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda _self, value: interpreter.TensorHandle(
            encode(np.array([value]), tl.bfloat16), tl.bfloat16
        )
    for name in ARITHMETIC:
        method = f"create_{name}"
        if hasattr(builder, method):
            setattr(builder, method, _refusing(name, getattr(builder, method)))


def pytest_configure(config: pytest.Config) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before triton is imported"
    torch.set_num_threads(1)
    mend()
