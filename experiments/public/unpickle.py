"""Pickled dictionaries of NumPy arrays, read without Python's unpickler, so that no code can run.

Only the opcodes needed for plain values and NumPy arrays are handled. The few global names in such files are compared
as strings and never imported; an array is built from its declared type, shape and bytes, all of which are checked.
"""

from __future__ import annotations

import io
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data.limits import check_expansion
from soseleto.errors import DataError

_TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first value of a file from torch.save before its zip format
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}
_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8")


class _Refused(ValueError):
    """The pickle holds something other than plain values and arrays."""


class _Name:
    def __init__(self, alias: str) -> None:
        self.alias = alias


class _Mark:
    pass


class _Dtype:
    def __init__(self, code: str) -> None:
        self.code, self.order = code, "="


class _Array:
    def __init__(self) -> None:
        self.value: Any = None


def load_pickle(path: Path) -> dict[Any, Any]:
    """The dictionary in a pickle file or a torch.save file (either format), with its arrays."""
    try:
        content = path.read_bytes()
        if content[:4] == b"PK\x03\x04":
            content = _from_zip(path)
        value = _last(io.BytesIO(content))
    except _Refused as error:
        raise DataError(f"{path} is refused: it {error}, and only arrays and plain values are allowed.") from error
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, EOFError, OSError, RuntimeError,
            NotImplementedError, MemoryError, OverflowError, zipfile.BadZipFile) as error:  # fmt: skip
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): fetch it again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__} where a dictionary of arrays was expected.")
    return {_plain(key): _plain(entry) for key, entry in value.items()}


def _last(stream: io.BytesIO) -> Any:
    """The data: the only value in the file, or the fourth in torch's older format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pickletools, on odd escapes in names
        value = _load(stream)
        if value == _TORCH_MAGIC:
            _load(stream), _load(stream)  # protocol version and machine
            value = _load(stream)
    return value


def _from_zip(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        (info,) = [one for one in archive.infolist() if one.filename.split("/")[-1] == "data.pkl"]
        check_expansion(info.compress_size, info.file_size, what=f"{info.filename} in {path}")
        return archive.read(info)


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, _Name | _Dtype | _Mark):
        raise DataError("a pickle holds a bare type where a value was expected.")
    return value


def _load(stream: io.BytesIO) -> Any:
    """One pickle from the stream, opcode by opcode."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name in _VALUES:
            stack.append(argument)
        elif name in ("BINSTRING", "SHORT_BINSTRING"):  # Python 2 text: bytes
            stack.append(argument.encode("latin-1"))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name not in ("PROTO", "FRAME"):
            _build(name, argument, stack)
    raise EOFError("the pickle has no STOP")


def _build(name: str, argument: Any, stack: list[Any]) -> None:
    """The opcodes that build values from the stack."""
    if name == "MARK":
        stack.append(_Mark())
    elif name in ("EMPTY_DICT", "EMPTY_LIST"):
        stack.append({} if name == "EMPTY_DICT" else [])
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        new = [stack.pop()] if name == "APPEND" else _since_mark(stack)
        _of(stack[-1], list).extend(new)
    elif name in ("SETITEM", "SETITEMS"):
        new = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
        _of(stack[-1], dict).update(zip(map(_key, new[::2]), new[1::2], strict=True))
    elif name == "GLOBAL":
        stack.append(_named(*argument.split(" ", 1)))
    elif name == "STACK_GLOBAL":
        attribute = stack.pop()
        stack.append(_named(stack.pop(), attribute))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_call(_of(stack.pop(), _Name).alias, _of(arguments, tuple)))
    elif name == "BUILD":
        state = stack.pop()
        _set_state(stack[-1], _of(state, tuple))
    else:
        raise _Refused(f"uses the pickle instruction {name}")


def _of(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__} was expected, got {type(value).__name__}")
    return value


def _key(value: Any) -> Any:
    return _of(value, str | bytes | int)


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1
    while not isinstance(stack[at], _Mark):
        at -= 1
        if at < 0:
            raise IndexError("an opcode has no mark")
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _named(module: Any, name: Any) -> _Name:
    alias = _NAMES.get((module, name))
    if alias is None:
        raise _Refused(f"refers to {module}.{name}")
    return _Name(alias)


def _call(alias: str, arguments: tuple[Any, ...]) -> Any:
    if alias == "encode" and len(arguments) == 2 and arguments[1] in ("latin1", "latin-1"):
        return _of(arguments[0], str).encode("latin-1")
    if alias == "dtype" and arguments:
        code = arguments[0].decode("ascii") if isinstance(arguments[0], bytes) else arguments[0]
        if code not in _CODES:
            raise _Refused(f"holds an array of type {code!r}")
        return _Dtype(code)
    if alias == "reconstruct" and arguments[1:2] == ((0,),) and getattr(arguments[0], "alias", "") == "ndarray":
        return _Array()
    raise _Refused(f"calls {alias} in an unknown way")


def _set_state(value: Any, state: tuple[Any, ...]) -> None:
    if isinstance(value, _Dtype):
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "=") or any(state[2:5]):
            raise _Refused("holds a structured array type")
        value.order = order
        return
    array, (_, shape, kind, fortran, raw) = _of(value, _Array), state
    flat = np.frombuffer(_of(raw, bytes), dtype=np.dtype(_of(kind, _Dtype).code).newbyteorder(kind.order))
    sides = tuple(_of(side, int) for side in _of(shape, tuple))
    if min(sides, default=0) < 0:
        raise ValueError(f"an array has shape {sides}")
    array.value = flat.reshape(sides, order="F" if fortran else "C")
