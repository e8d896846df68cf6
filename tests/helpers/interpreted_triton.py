"""Triton kernels without a GPU: run by Triton's own interpreter, on numpy."""

from __future__ import annotations

import os
from pathlib import Path

DEVICE_FILES = ("nvidiactl", "dxg", "kfd")  # NVIDIA's, NVIDIA's under WSL, AMD's


def interpret_where_no_gpu_is() -> None:
    """Let Triton interpret kernels where none can be compiled and run; before anything imports Triton."""
    if not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def has_gpu() -> bool:
    """True on a machine with a GPU; asked without CUDA, which forks of a process that has asked it cannot use."""
    return any((Path("/dev") / name).exists() for name in DEVICE_FILES)


def repair_interpreter() -> None:
    """Fix bugs of the interpreter of Triton 3.6: loops with numpy 2.4, bfloat16, and the bits of a matmul.

    numpy 2.4 no longer makes a number of an array of one element. bfloat16 lies in arrays of uint16: the interpreter
    multiplies those as they are, and rounds towards zero where it makes them.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "repaired", False):
        return
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    convert = interpreter._convert_float

    def patch_and_repair(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_float(data, source, target, rounding):
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.view(numpy.uint16).astype(numpy.uint32) << 16
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = numpy.ascontiguousarray(data, dtype=numpy.float32).view(numpy.uint32).astype(numpy.uint64)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
            return numpy.where(numpy.isnan(data), 0x7FC0, rounded).astype(numpy.uint16)
        return convert(data, source, target, rounding)

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = convert_float(handle.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(data.view(numpy.float32), tl.float32)

    def create_dot(self, a, b, d, *options):
        a, b = widened(a), widened(b)
        if d.data.dtype != numpy.float32 or {a.data.dtype, b.data.dtype} - {numpy.dtype("f2"), numpy.dtype("f4")}:
            return dot(self, a, b, d, *options)
        # in float64, where sums of products of 16 bits are exact: on some processors numpy's float32 matmul
        # rounds an element as its place in the tile has it
        summed = numpy.matmul(a.data, b.data, dtype=numpy.float64).astype(numpy.float32)
        return interpreter.TensorHandle(summed + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot = patch_and_repair, create_dot
    interpreter._convert_float, interpreter.repaired = convert_float, True
    _quicken_interpreter()


def _quicken_interpreter() -> None:
    """Let a kernel replace the language's functions once, and not again in each call of a function of the device.

    That, and a table of all dtypes that was made for each tensor, was 45 % of the time of an interpreted kernel. A
    check of integers for an overflow, which reports only where kernels are debugged, was a seventh of the rest.
    """
    import dataclasses
    import functools
    import inspect

    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    replaced = set()  # the modules of the language whose functions are, in the kernel that runs

    @functools.cache
    def languages(function):
        return {m.__name__ for m in function.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)}

    def patch_for_a_kernel(function):
        replaced.clear()
        replaced.update(languages(function))
        return patch_lang(function)

    def call_on_the_device(self, *args, **kwargs):
        if not (here := languages(self.fn)) <= replaced:
            patch_lang(self.fn)
            replaced.update(here)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    dtypes = {}

    def numpy_dtype_once(dtype):
        if type(dtype) is not tl.dtype:
            return numpy_dtype(dtype)
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang, interpreter._get_np_dtype = patch_for_a_kernel, numpy_dtype_once
    interpreter.InterpretedFunction.__call__ = call_on_the_device
