"""Run something right after a module is imported, without importing it.

Imports nothing but ``sys``: this runs at the start of every recorded Python process.
"""

import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: What waits for a module, by its name.
_waiting: "dict[str, list[Callable[[ModuleType], object]]]" = {}


def when_imported(name: str, callback: "Callable[[ModuleType], object]") -> "Callable[[], object]":
    """Call ``callback(module)`` once ``name`` is imported; at once if it already is.

    An exception of the callback reaches whoever imports the module.

    Returns:
        A function that ends the waiting.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return lambda: None
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    callbacks = _waiting.setdefault(name, [])
    callbacks.append(callback)
    return lambda: callbacks.remove(callback) if callback in callbacks else None


class _Finder:
    """Finds nothing itself: has callbacks run after whatever the other finders find.

    It stays on ``sys.meta_path`` for good, since removing it while another thread walks the list
    would hide a finder from that thread.
    """

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if not _waiting.get(name):
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _follow(name, spec)
                    return spec
        return None


_finder = _Finder()


def _follow(name: str, spec: "ModuleSpec") -> None:
    """Make the module's own loader call back once it has run the module."""
    loader = spec.loader
    if loader is None:  # a namespace package: a folder that only has the module's name
        return
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        execute(module)
        del loader.exec_module  # the class's method shows again
        callbacks = _waiting[name]
        while callbacks:
            callbacks.pop(0)(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
