"""Run something right after a module is imported, without importing it.

Imports nothing but ``sys``: this runs at the start of every recorded Python process.
"""

import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_imported(name: str, callback: "Callable[[ModuleType], object]") -> None:
    """Call ``callback(module)`` once ``name`` is imported; at once if it already is.

    An exception of the callback reaches whoever imports the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder:
    """Finds nothing itself: has the callback run after whatever the other finders find.

    It stays on ``sys.meta_path`` for good, since removing it while another thread walks the list
    would hide a finder from that thread.
    """

    def __init__(self, name: str, callback: "Callable[[ModuleType], object]") -> None:
        self._name = name
        self._callback = callback
        self._done = False

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if name != self._name or self._done:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._follow(spec)
                    return spec
        return None

    def _follow(self, spec: "ModuleSpec") -> None:
        """Make the module's own loader call back once it has run the module."""
        loader = spec.loader
        if loader is None:  # a namespace package: a folder that only has the module's name
            return
        execute = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            execute(module)
            del loader.exec_module  # the class's method shows again
            if not self._done:
                self._done = True
                self._callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
