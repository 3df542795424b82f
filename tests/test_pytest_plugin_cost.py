"""What the plugin costs where nothing asks for it."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

IMPORT = """
import sys, time
import pytest

start = time.process_time()
import memtrace.pytest_plugin
print(time.process_time() - start, "torch" in sys.modules, "numpy" in sys.modules)
"""


def test_the_import_is_light() -> None:
    """At most 20 ms of the CPU, without torch or numpy; the best of a few on a busy machine."""
    took = []
    for _ in range(5):
        out = subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
        ).stdout.split()
        assert out[1:] == ["False", "False"]
        took.append(float(out[0]))
    assert min(took) <= 0.020


def test_nothing_is_imported_or_hooked_where_no_test_asks(pytester: pytest.Pytester) -> None:
    """Nor is a folder made."""
    pytester.makeconftest(
        """
        import sys

        def pytest_sessionfinish(session):
            names = [name for name in sys.modules if name.startswith("memtrace.")]
            plugins = session.config.pluginmanager.list_name_plugin()
            print("imported", names, "torch" in sys.modules)
            print("registered", [name for name, plugin in plugins if "memtrace" in name])
        """
    )
    pytester.makepyfile("def test_it():\n    pass\n")
    result = pytester.runpytest_subprocess("-s")
    result.stdout.fnmatch_lines(
        ["*imported [[]'memtrace.pytest_plugin'] False", "registered [[]'memtrace']"]
    )
    assert not (pytester.path / ".pytest_cache" / "d" / "memory").exists()
