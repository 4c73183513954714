"""The moment a graph is compiled: the only time the compiled probes stand in the network.

MindSpore compiles a cell (``GRAPH_MODE``) or a function (``@ms.jit``, ``value_and_grad`` in graph mode) once for each
key and then runs the graph from a cache. Python hooks do not run in a graph; code that stands in ``construct`` while
the graph is compiled does. So the probes are put in just before MindSpore compiles, taken out right after, and the
cache key carries a suffix that says which probes a graph holds:

* nothing of ours is left in the cells while they run;
* a network compiled before watching began is compiled again, with probes;
* an unsampled step and a network no longer watched run the user's own, untouched graph.

Some functions of ``mindspore.graph.api`` are replaced while at least one client is attached, and put back afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mindspore.graph import api


class Client(Protocol):
    """Someone who wants probes in the graphs that are compiled from now on."""

    def graph_token(self) -> str:
        """What distinguishes graphs with this client's probes; ``""`` for a graph without any."""
        ...

    def install(self, owner: Any) -> Callable[[], None]:
        """Puts the probes in, or takes the Python ones out of the parser's sight. ``owner`` is the cell whose own
        ``construct`` is compiled, or None for a function.

        Returns:
            A function that takes them out again.
        """
        ...

    def take_hooks_out(self) -> Callable[[], None]:
        """Takes all hooks out of the parameters; returns a function that puts them back."""
        ...

    def running(self) -> None:
        """A graph is about to run."""
        ...

    def compiled(self, executor: Any, phase: str) -> bool:
        """A graph was compiled between :meth:`install` and its undoing; the executor holds it under ``phase``.

        Returns:
            Whether to throw it away and compile it anew, with what :meth:`install` puts in now.
        """
        ...

    def stay_whole(self) -> None:
        """What was compiled anew does not compile: the next one is to be as it was before."""
        ...

    def settled(self) -> None:
        """The graph that is going to run is compiled, or none could be."""
        ...

    def silenced(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the client wants no probes in any graph."""
        ...

    def failed_to_compile(self, error: Exception) -> None:
        """A graph compiled only without the client's probes."""
        ...


_clients: list[Client] = []
_undo: contextlib.ExitStack | None = None
_compiling: list[Callable[[], None]] = []


def attach(client: Client) -> None:
    """Lets ``client`` take part in every compilation until :func:`detach`.

    Raises:
        AttributeError: This MindSpore lacks one of the functions named above; nothing was changed.
    """
    global _undo
    if not _clients:
        _undo = _replace()
    _clients.append(client)


def detach(client: Client) -> None:
    """Ends :func:`attach`; with the last client MindSpore's functions are put back. Unknown clients are passed over."""
    global _undo
    if client in _clients:
        _clients.remove(client)
    if not _clients and _undo is not None:
        _undo.close()
        _undo = None


def _suffix() -> str:
    return "".join(f"|{token}" for token in (client.graph_token() for client in _clients) if token)


def _replace() -> contextlib.ExitStack:
    real_phase = api._real_phase
    generate_name = api._JitExecutor._get_generate_name
    check_recompile = api._check_recompile
    clear_res = api._PyNativeExecutor.clear_res
    compile_function = api._JitExecutor.compile
    compile_cell = api._CellGraphExecutor.compile

    @functools.wraps(real_phase)
    def phase_with_suffix(phase: str, obj: Any) -> str:
        return str(real_phase(phase, obj)) + _suffix()

    @functools.wraps(generate_name)
    def name_with_suffix(self: Any) -> tuple[str, str]:
        name, shown = generate_name(self)
        return name + _suffix(), shown

    @functools.wraps(check_recompile)
    def about_to_compile(obj: Any, *args: Any, **kwargs: Any) -> Any:
        result = check_recompile(obj, *args, **kwargs)
        # MindSpore calls this after the cache was asked and right before it parses: the one place to put probes in.
        for client in list(_clients):
            _compiling.append(client.install(obj))
        return result

    @functools.wraps(compile_function)
    def compile_function_cleanly(self: Any, *args: Any, **kwargs: Any) -> Any:
        compile_now = functools.partial(compile_function, self, *args, **kwargs)
        return _cleanly(compile_now, self._graph_executor, None, lambda phase: phase)

    @functools.wraps(compile_cell)
    def compile_cell_cleanly(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        compile_now = functools.partial(compile_cell, self, obj, *args, **kwargs)
        return _cleanly(compile_now, self._graph_executor, obj, lambda result: result[0])

    @functools.wraps(clear_res)
    def clear_res_without_hooks(self: Any) -> Any:
        # After a failed compilation MindSpore forgets all hook numbers: a hook that is in then could never be removed.
        back = [client.take_hooks_out() for client in _clients]
        try:
            return clear_res(self)
        finally:
            for put_back in back:
                put_back()

    stack = contextlib.ExitStack()
    for owner, name, new in (
        (api, "_real_phase", phase_with_suffix),
        (api._JitExecutor, "_get_generate_name", name_with_suffix),
        (api, "_check_recompile", about_to_compile),
        (api._JitExecutor, "compile", compile_function_cleanly),
        (api._CellGraphExecutor, "compile", compile_cell_cleanly),
        (api._PyNativeExecutor, "clear_res", clear_res_without_hooks),
    ):
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)
    return stack


def _cleanly(compile_now: Callable[[], Any], executor: Any, cell: Any, phase_of: Callable[[Any], str]) -> Any:
    """Compiles with the probes in, which are taken out afterwards.

    Args:
        compile_now: MindSpore's own function, which may find the graph in its cache.
        executor: MindSpore's executor, which holds the graph.
        cell: The cell that is compiled, None for a function.
        phase_of: The key of the graph, from what ``compile_now`` returns.
    """

    def once() -> tuple[Any, bool]:
        with _taken_out_afterwards() as is_new:
            result = compile_now()
            return result, is_new() and _tell(executor, phase_of(result))

    def forget(result: Any) -> None:
        phase = phase_of(result)
        (api.ms_compile_cache if cell is None else cell.compile_cache).discard(phase)
        executor.del_net_res(cell, {phase})

    return _until_settled(functools.partial(_slimmed, once, forget))


def _until_settled(compile_once: Callable[[], Any]) -> Any:
    """Compiles again where the probes learned something from compiling that changes them (see ``_capture``)."""
    # MindSpore comes by here before every run, for the key of the graph.
    for client in _clients:
        client.running()
    for _ in range(3):
        before = _suffix()
        try:
            result = compile_once()
        except Exception as error:
            if not before:
                raise
            return _without_probes(compile_once, error)
        if _suffix() == before:
            break
    return result


def _slimmed(compile_once: Callable[[], tuple[Any, bool]], forget: Callable[[Any], None]) -> Any:
    """Compiles, and once more where the probes say from what they read in the graph that they can do with less.

    The graph that was thrown away never ran: MindSpore tunes a graph in its first runs.
    """
    try:
        result, again = compile_once()
        if again:
            try:
                forget(result)
                result, again = compile_once()
                if again:
                    forget(result)
            except Exception:  # noqa: BLE001 - the whole one did compile, and is what the user gets
                again = True
            if again:
                for client in _clients:
                    client.stay_whole()
                result, _ = compile_once()
    finally:
        for client in _clients:
            client.settled()
    return result


def _without_probes(compile_once: Callable[[], Any], error: Exception) -> Any:
    """The network does not compile with our probes in it: the user's own graph must, or the error is the user's."""
    with contextlib.ExitStack() as stack:
        for client in _clients:
            stack.enter_context(client.silenced())
        result = compile_once()
    for client in list(_clients):
        client.failed_to_compile(error)
    return result


def _tell(executor: Any, phase: str) -> bool:
    wanted = [client.compiled(executor, phase) for client in list(_clients)]  # each wants to be told
    return any(wanted)


@contextlib.contextmanager
def _taken_out_afterwards() -> Iterator[Callable[[], bool]]:
    """Undoes what was installed inside; hands out whether anything was, that is, whether MindSpore really compiled."""
    before = len(_compiling)
    try:
        yield lambda: len(_compiling) > before
    finally:
        while len(_compiling) > before:
            _compiling.pop()()
