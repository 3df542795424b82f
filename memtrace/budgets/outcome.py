"""How a breach leaves a test, and what its report carries."""

from collections.abc import Iterable, Sequence

import pytest

from memtrace.budgets.verdicts import Finding


class MemoryBudgetExceeded(pytest.fail.Exception):  # type: ignore[name-defined]
    """A test took more memory than its budget; ``xfail(raises=…)`` may name it."""

    def __init__(self, headline: str, text: str) -> None:
        super().__init__(text, pytrace=False)
        self.headline = headline


def mark(report: pytest.TestReport, headline: str) -> None:
    """Make the report one of a breach, with the numbers in front."""
    report.over_budget = headline  # type: ignore[attr-defined]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = headline


def raise_for(findings: Sequence[Finding]) -> None:
    """Fail the test for what was found in it, if that isn't good.

    Raises:
        MemoryBudgetExceeded: a limit was exceeded.
        pytest.fail.Exception: a limit can't be judged.
    """
    bad = [one for one in findings if not one.good]
    headlines = [headline for one in bad for headline in one.over]
    text = "\n\n".join(one.text for one in bad)
    if headlines:
        raise MemoryBudgetExceeded(", ".join(headlines), text)
    if bad:
        pytest.fail(text, pytrace=False)


def add_section(report: pytest.TestReport, one: Finding) -> None:
    """Show a finding below the other reason why the test failed."""
    title = "memory budget: " + (", ".join(one.over) or "not judged")
    add = getattr(report.longrepr, "addsection", None)
    if add is not None:
        add(title, one.text)
    else:
        report.sections.append((title, one.text))


def properties(findings: Iterable[Finding]) -> list[tuple[str, object]]:
    """What JUnit's XML says of a test: bytes by ``memory.DEVICE.METRIC``.

    A block's have its label after ``memory``. Limits are ``memory.limit.METRIC``, and a run that
    is kept ``memory.trace``.
    """
    found: list[tuple[str, object]] = []
    for one in findings:
        prefix = "memory." if one.label in (None, "plateau") else f"memory.{one.label}."
        for device, values in one.devices.items():
            found += [(f"{prefix}{device}.{metric}", size) for metric, size in values.items()]
        for limit in one.limits:
            phase = f".{limit['phase']}" if limit["phase"] else ""
            found.append((f"{prefix}limit.{limit['metric']}{phase}", limit["allowed"]))
        for slope in one.plateau:
            found.append((f"{prefix}{slope['device']}.{slope['measure']}.slope", slope["slope"]))
        if one.trace is not None:
            found.append((f"{prefix}trace", one.trace))
    return found
