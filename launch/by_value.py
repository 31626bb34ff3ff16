"""Functions that travel to another process as code, not as a name to import: lambdas, closures, what a notebook or a test file defines.

Code keeps the name of its source file on the way, so tracebacks and programs still point at the user's lines.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle

from hostir.errors import InputError


def _code(make: Callable[..., types.CodeType], args: tuple[Any, ...], file: str) -> types.CodeType:
    return make(*args).replace(co_filename=file)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, args, *_ = cloudpickle.CloudPickler.dispatch_table[types.CodeType](code)
    return _code, (make, args, code.co_filename)


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap({types.CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:  # a module with a class of its own, such as hostir
            return importlib.import_module, (value.__name__,)
        return super().reducer_override(value)


def dumps(value: object) -> bytes:
    """``value`` pickled; ``pickle.loads`` reads it."""
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


def dumps_call(fn: Callable[..., Any], payload: object) -> bytes:
    """``payload``, which contains ``fn``, pickled; ``fn``'s module goes along where another process could not import it.

    InputError when something in it cannot travel.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", "") or "")
    travels = module is not None and not _is_installed(module)
    if travels:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(payload)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{getattr(fn, '__name__', 'the function')} cannot be sent to other processes: {error}",
            expected="a function and arguments that pickle",
            cure='create locks, files, streams and meshes inside the function, or use transport="threads"',
        ) from error
    finally:
        if travels:
            cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: types.ModuleType) -> bool:
    """Whether any Python process would find this module: part of the standard library, or of what is installed."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or file is None:
        return module.__name__ in sys.builtin_module_names
    return module.__name__.partition(".")[0] == "hostir" or "site-packages" in file or file.startswith(os.path.dirname(os.__file__))
