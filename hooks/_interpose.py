"""Standing between Python and every operator call, in PyNative mode.

MindSpore has no hook for this that works with gradients: ``MsDispatchMode`` sits inside autograd, so what a handler
casts there is invisible to the backward pass. The Python entry points lie outside autograd and outside the implicit
casts of mixed precision, so they are where a call can be seen as the user wrote it, and be replaced by another one:

* module-level ``pyboost_*`` functions, called by the primitives of ``gen_ops_prim`` and three more modules;
* ``_Pyboost*Prim.__call__`` of ``pyboost_inner_prim``, called by most of ``mindspore.ops``;
* ``_*_instance`` of ``functional_overload`` and ``tensor``, called by most of ``mindspore.mint``;
* Tensor methods and operators (``x.sum()``, ``x + y``, ``x[0]``);
* ``run_op_async`` of the executor, called by all other primitives.

One call of the user may pass several of them; the outermost is the call that counts. That all dispatched operators fall
inside one of them is checked by :func:`ampdebug.hooks._audit.audit_coverage`, not assumed.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from mindspore import Tensor, nn
from mindspore._c_expression import TensorPy
from mindspore.graph import api

Function = Callable[..., Any]

_PYBOOST_MODULES = (
    "mindspore.ops.auto_generate.gen_ops_prim",
    "mindspore.ops.operations.manually_defined.ops_def",
    "mindspore.ops.operations.nn_ops",
    "mindspore.ops.operations._inner_ops",
)
_INNER_PRIM_MODULE = "mindspore.ops.auto_generate.pyboost_inner_prim"
_INSTANCE_MODULES = ("mindspore.ops.functional_overload", "mindspore.common.tensor")

# Methods of a tensor that compute nothing: they tell about it, hand its memory over, or manage it.
_NOT_OPERATORS = """
asnumpy numpy tolist item is_contiguous storage storage_offset stride strides data_ptr size shape dtype ndim set_dtype
set_init_flag is_init init_finished data_sync register_hook remove_hook hooks wait_pipeline const_arg get_bytes
convert_bytes_to_tensor symbolic_shape is_pinned pin_memory offload offload_file_path assign_value_cpp set_cast_dtype
set_device_address param_info parent_tensor_ index_of_parent_ init virtual_flag is_shared requires_grad_
untyped_storage to_dlpack from_dlpack from_numpy device is_complex is_signed is_meta move_to getitem_index_info
setitem_index_info init_flag set_param_info adapter_flag dim nbytes itemsize data new_zeros new_ones new_empty new_full
"""
_OPERATOR_SYMBOLS = """
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv matmul rmatmul imatmul pow rpow mod floordiv
rfloordiv neg abs getitem setitem eq ne lt le gt ge
"""
_PYTHON_METHODS = ("astype", "softmax")  # defined in Python over a C++ call that is no other entry point
# Said by the C++ side in passing; not operators of the user.
_NOT_CALLS = frozenset({"typeof", "make_range"})


class Watcher(Protocol):
    """What gets the calls. Calls made from inside a method are passed through unseen."""

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator call. Returns what the caller is to get; ``function(*args, **kwargs)`` makes the call."""

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """A call of a cell; ``call()`` makes it. What its construct calls is seen."""

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """A call of a compiled (``@ms.jit``) function; nothing inside it can be seen."""


class _Dispatcher:
    """Hands calls of one thread to one watcher, the outermost of nested calls only."""

    __slots__ = ("_inside", "_thread", "_watcher")

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        # Data pipelines call operators in threads of their own; those are no part of the network.
        self._thread = threading.get_ident()
        self._inside = False

    def operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or name in _NOT_CALLS or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        self._inside = True
        try:
            return self._watcher.on_operator(name, function, args, kwargs)
        finally:
            self._inside = False

    def cell(self, original: Function, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or threading.get_ident() != self._thread:
            return original(cell, *args, **kwargs)
        return self._watcher.on_cell(cell, args, kwargs, lambda: original(cell, *args, **kwargs))

    def compiled(self, original: Function, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or threading.get_ident() != self._thread:
            return original(compiled, *args, **kwargs)
        self._inside = True  # a compilation calls Python functions with abstract values
        try:
            name = getattr(compiled.fn, "__qualname__", str(compiled.fn))
            return self._watcher.on_compiled(name, args, kwargs, lambda: original(compiled, *args, **kwargs))
        finally:
            self._inside = False


_MISSING = object()


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute and puts back what stood in the owner itself; an inherited one comes back by deletion."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


@contextmanager
def interpose(watcher: Watcher) -> Iterator[None]:
    """Sends every operator, cell and compiled call of this thread through ``watcher`` while the context lasts.

    Contexts nest: the inner watcher sees a call first, what it then calls goes to the outer one. They must be left in
    reverse order.

    Args:
        watcher: See :class:`Watcher`.
    """
    dispatcher = _Dispatcher(watcher)
    with ExitStack() as undo:
        for module_name in _PYBOOST_MODULES:
            module = importlib.import_module(module_name)
            for name, function in list(vars(module).items()):
                if name.startswith("pyboost_") and callable(function):
                    _replace(undo, module, name, _pyboost(dispatcher, function))
        inner = importlib.import_module(_INNER_PRIM_MODULE)
        for name, cls in list(vars(inner).items()):
            if inspect.isclass(cls) and name.startswith("_Pyboost") and "__call__" in vars(cls):
                operator = name.removeprefix("_Pyboost").removesuffix("Prim")
                _replace(undo, cls, "__call__", _function(dispatcher, operator, vars(cls)["__call__"]))
        for module_name in _INSTANCE_MODULES:
            module = importlib.import_module(module_name)
            for name, function in list(vars(module).items()):
                if name.startswith("_") and name.endswith("_instance") and callable(function):
                    operator = f"mint.{name[1:].removesuffix('_instance')}"
                    _replace(undo, module, name, _function(dispatcher, operator, function))
        for name in _tensor_methods():
            method = getattr(Tensor, name)
            _replace(undo, Tensor, name, _function(dispatcher, f"Tensor.{name}", method))
        executor = type(api._pynative_executor)
        _replace(undo, executor, "run_op_async", _run_op(dispatcher, executor.run_op_async))
        _replace(undo, nn.Cell, "__call__", _cell(dispatcher, nn.Cell.__call__))
        _replace(undo, api._JitExecutor, "__call__", _compiled(dispatcher, api._JitExecutor.__call__))
        yield


def _tensor_methods() -> list[str]:
    skipped = set(_NOT_OPERATORS.split())
    public = [name for name in dir(TensorPy) if not name.startswith("_") and name not in skipped]
    names = [*public, *(f"__{name}__" for name in _OPERATOR_SYMBOLS.split()), *_PYTHON_METHODS]
    return [
        name
        for name in dict.fromkeys(names)
        if callable(getattr(Tensor, name, None))
        and not isinstance(inspect.getattr_static(Tensor, name), (property, staticmethod, classmethod))
    ]


def _pyboost(dispatcher: _Dispatcher, function: Function) -> Function:
    operator = dispatcher.operator

    def call(primitive: Any, args: Any) -> Any:
        return operator(primitive.name, function, (primitive, args), {})

    return call


def _function(dispatcher: _Dispatcher, name: str, function: Function) -> Function:
    operator = dispatcher.operator

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(name, function, args, kwargs)

    call.__name__ = name.rpartition(".")[2]
    return call


def _run_op(dispatcher: _Dispatcher, original: Function) -> Function:
    operator = dispatcher.operator

    def run_op_async(self: Any, primitive: Any, name: str, args: Any) -> Any:
        return operator(name, lambda primitive, args: original(self, primitive, name, args), (primitive, args), {})

    return run_op_async


def _cell(dispatcher: _Dispatcher, original: Function) -> Function:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatcher.cell(original, self, args, kwargs)

    return __call__


def _compiled(dispatcher: _Dispatcher, original: Function) -> Function:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatcher.compiled(original, self, args, kwargs)

    return __call__
