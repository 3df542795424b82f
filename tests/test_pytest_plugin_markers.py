"""The markers memory_budget and memory_plateau: what they say and what they count."""

import pytest

from tests.budgeting import measured, run, words

pytest_plugins = ["pytester"]


def test_metrics_are_peak_end_and_total(pytester: pytest.Pytester) -> None:
    """Each by its name, and exactly: being at a limit is within it."""
    source = """
@budget(peak="4 MiB", end="1 MiB", total="5 MiB", live="3 MiB", Temp="2 MiB", other="1 MiB",
        Act=MiB, **{"KV_res/full": "0 B"})
def test_at_every_limit():
    KEPT.append(mib(1))
    with scopes.component("Temp"):
        temp = mib(2)
    with scopes.component("Act"):
        act = mib(1)
        del act
        act = mib(1)

@budget(peak=MiB - 1)
def test_peak():
    mib(1)

@budget(end=MiB - 1)
def test_end():
    KEPT.append(mib(1))

@budget(total=2 * MiB - 1)
def test_total():
    mib(1)
    mib(1)

@budget(Temp=MiB - 1)
def test_component():
    with scopes.component("Temp"):
        mib(1)
"""
    result = run(pytester, source, "-rA")
    result.stdout.fnmatch_lines(
        [
            "OVER BUDGET peak 1.0 MiB > 1024.0 KiB (+1 B) test_it.py::test_peak",
            "OVER BUDGET end 1.0 MiB > 1024.0 KiB (+1 B) test_it.py::test_end",
            "OVER BUDGET total 2.0 MiB > 2.0 MiB (+1 B) test_it.py::test_total",
            "OVER BUDGET Temp 1.0 MiB > 1024.0 KiB (+1 B) test_it.py::test_component",
            "*2 passed, 4 over budget*",  # what is left shows after a test has passed
        ]
    )


def test_several_budgets_and_markers(pytester: pytest.Pytester) -> None:
    """All are judged and all breaches are said."""
    source = """
@budget(peak="1 MiB", Temp="1 MiB", Act="1 MiB")
@budget(total="3 MiB")
def test_it():
    with scopes.component("Temp"):
        temp = mib(2)
    with scopes.component("Act"):
        act = mib(2)
"""
    result = run(pytester, source)
    line = "OVER BUDGET total * peak 4.0 MiB > 1.0 MiB (+3.0 MiB), Temp * Act * test_it.py::test_it"
    result.stdout.fnmatch_lines([line])


def test_a_phase(pytester: pytest.Pytester) -> None:
    """Only what is allocated in the phase raises its peak; what it finds there counts."""
    source = """
def prefill():
    with scopes.phase("prefill"):
        mib(3)

@budget(peak="3 MiB", phase="prefill")
def test_another_phase_may_take_more():
    prefill()
    with scopes.phase("decode"):
        mib(9)

@budget(peak="3 MiB", phase="prefill")
def test_what_was_there_counts():
    kept = mib(1)
    prefill()

@budget(total="3 MiB", phase="prefill")
@budget(total="12 MiB")
def test_total_of_a_phase():
    prefill()
    mib(9)

@budget(peak="3 MiB", phase="prefil")
def test_a_phase_that_never_happened():
    prefill()
"""
    result = run(pytester, source, "-rA")
    result.stdout.fnmatch_lines(
        ["*memory budget can't be judged: phase 'prefil' never happened; there were prefill"]
    )
    assert words(result) == {
        "test_another_phase_may_take_more": "PASSED",
        "test_what_was_there_counts": "OVER",
        "test_total_of_a_phase": "PASSED",
        "test_a_phase_that_never_happened": "FAILED",
    }


def test_tolerance(pytester: pytest.Pytester) -> None:
    source = """
@budget(peak="10 MiB", tolerance="10 %")
@pytest.mark.parametrize("n", [11, 12])
def test_share(n):
    mib(n)

@budget(peak="10 MiB", tolerance="1 MiB")
@pytest.mark.parametrize("n", [11, 12])
def test_size(n):
    mib(n)
"""
    found = words(run(pytester, source, "-rA"))
    assert found == {
        "test_share[11]": "PASSED",
        "test_share[12]": "OVER",
        "test_size[11]": "PASSED",
        "test_size[12]": "OVER",
    }


def test_fixtures_count_unless_only_the_body_does(pytester: pytest.Pytester) -> None:
    """A test's own fixtures, and what they do at its end; not those that it shares with others."""
    source = """
@pytest.fixture
def own():
    yield mib(4)

@pytest.fixture
def late():
    yield
    mib(8)

@pytest.fixture(scope="module")
def shared():
    mib(16)  # a transient of making it
    return mib(4)

@pytest.fixture(scope="module")
def above(shared):
    return mib(4)

@budget(peak="2 MiB")
def test_of_a_fixture(own):
    mib(1)

@budget(peak="2 MiB", scope="body")
def test_of_the_body(own, late):
    mib(1)

@budget(peak="2 MiB")
def test_of_shared_ones(above):
    mib(1)

@budget(peak="2 MiB")
def test_of_the_teardown(late):
    mib(1)

@budget(end="0 B")
def test_nothing_is_left(own, above):
    pass
"""
    result = run(pytester, source, "-rA")
    assert words(result) == {
        "test_of_a_fixture": "OVER",
        "test_of_the_body": "PASSED",
        "test_of_shared_ones": "PASSED",
        "test_of_the_teardown": "OVER",
        "test_nothing_is_left": "PASSED",
    }
    result.assert_outcomes(passed=4)  # the test whose teardown is over has passed before
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_the_same_alone_and_after_others(pytester: pytest.Pytester) -> None:
    """Neither older tensors nor garbage nor a shared fixture that another makes change it."""
    source = """
@pytest.fixture(scope="session")
def model():
    return torch.nn.Linear(1024, 1024)

def test_leaves_much_behind():
    KEPT.append(mib(64))
    for _ in range(50):
        garbage = [mib(1)]
        garbage.append(garbage)

def test_uses_the_model_first(model):
    model(torch.ones(4, 1024))

@budget(peak="1 GiB")
def test_measured(model):
    model(torch.ones(4, 1024))
    KEPT.clear()
"""
    every = measured(pytester, source)["test_measured"]
    alone = measured(pytester, source, "-k", "measured")["test_measured"]
    after_one = measured(pytester, source, "-k", "first or measured")["test_measured"]
    assert alone == after_one
    assert {**every, "end": 0} == {**alone, "end": 0}
    assert every["end"] == -(64 << 20)  # it freed what an older one had left
    assert alone["peak"] == 2 * 4 * 1024 * 4


@pytest.mark.slow
def test_the_same_a_hundred_times(pytester: pytest.Pytester) -> None:
    """Events in program order, not samples: the same bytes each time."""
    source = """
@budget(peak="1 GiB")
@pytest.mark.parametrize("n", range(100))
def test_it(n):
    x = torch.randn(64, 64)
    for _ in range(20):
        x = torch.relu(x @ x) + 1
    loops = [x]
    loops.append(loops)
"""
    found = measured(pytester, source)
    assert len(found) == 100
    assert len({str(sorted(values.items())) for values in found.values()}) == 1
    assert found["test_it[0]"]["peak"] > 0


def test_warm_up_leaves_first_use_out(pytester: pytest.Pytester) -> None:
    """The body runs before it is measured: what that leaves was there before."""
    source = """
def first_use():
    if not KEPT:
        KEPT.append(mib(8))
    mib(1)

@budget(peak="1 MiB")
def test_cold():
    first_use()
    KEPT.clear()

@budget(peak="1 MiB", end="0 B", warmup=2)
def test_warm():
    first_use()

@budget(peak="1 MiB", warmup=1)
def test_fails_in_warm_up():
    assert 1 == 2
"""
    result = run(pytester, source, "-rA")
    assert words(result) == {
        "test_cold": "OVER",
        "test_warm": "PASSED",
        "test_fails_in_warm_up": "FAILED",
    }


def test_relative_budgets(pytester: pytest.Pytester) -> None:
    """A share of what a test or block with that name took, whatever stands first in the file."""
    source = """
@budget(peak="50 % of whole_prompt", Temp="100 % of whole_prompt")
@pytest.mark.parametrize("n", [2, 3])
def test_ours(n):
    mib(n)

@budget(peak="50 % of whole_prompt")
def test_without_parameters():
    mib(2)

@budget(peak="200 % of whole_prompt", tolerance="1 MiB")
@pytest.mark.parametrize("n", [2])
def test_tolerance(n):
    mib(9)

@budget(name="whole_prompt")
@pytest.mark.parametrize("n", [2, 3])
def test_theirs(n):
    mib(4 if n == 2 else 5)

def test_in_blocks(memory_budget):
    with memory_budget(name="block"):
        mib(4)
    with memory_budget(peak="50 % of block"):
        mib(3)

@budget(peak="50 % of nobody")
def test_of_nobody():
    pass

@budget(name="broken")
def test_broken():
    assert 1 == 2

@budget(peak="50 % of broken")
def test_of_broken():
    pass
"""
    result = run(pytester, source, "-rA")
    assert words(result) == {
        "test_theirs[2]": "PASSED",
        "test_theirs[3]": "PASSED",
        "test_ours[2]": "PASSED",
        "test_ours[3]": "OVER",
        "test_without_parameters": "FAILED",
        "test_tolerance[2]": "PASSED",
        "test_in_blocks": "OVER",
        "test_of_nobody": "FAILED",
        "test_broken": "FAILED",
        "test_of_broken": "FAILED",
    }
    result.stdout.fnmatch_lines_random(
        [
            "peak * 2.5 MiB * 3.0 MiB * +512.0 KiB  (50 % of whole_prompt)",
            "*baseline 'whole_prompt' was measured 2 times, with other parameters than these",
            "*baseline 'nobody' was not measured in this session*",
            "*baseline 'broken' was not measured: its test failed",
        ]
    )


def test_a_nearer_marker_wins(pytester: pytest.Pytester) -> None:
    """On the same metric and phase; ``None`` lifts a limit."""
    source = """
pytestmark = budget(peak="1 MiB", total="8 MiB")

def test_of_the_module():
    mib(2)

@budget(peak="4 MiB")
class TestClass:
    def test_of_the_class(self):
        mib(2)

    @budget(peak="1 MiB")
    def test_stricter(self):
        mib(2)

    @budget(peak=None)
    def test_lifted(self):
        mib(5)

    @budget(peak=None)
    def test_the_rest_holds(self):
        mib(5)
        mib(5)
"""
    assert words(run(pytester, source, "-rA")) == {
        "test_of_the_module": "OVER",
        "TestClass::test_of_the_class": "PASSED",
        "TestClass::test_stricter": "OVER",
        "TestClass::test_lifted": "PASSED",
        "TestClass::test_the_rest_holds": "OVER",
    }


#: Wrong markers, and what is said of them.
WRONG = [
    ('budget(peak="2 GiBs")', "peak: '2 GiBs' is not a size; write it as 300 MiB, 1.5 GiB, 2 GB"),
    ('budget(peak="24 MBxyz")', "'24 MBxyz' is not a size"),
    ("budget(peak=1.5)", "peak: 1.5 is not a size"),
    ("budget(peak=-1)", "peak: -1 is not a size"),
    ('budget(Temp="50 %")', "or 4096 (bytes), or as 50 % of NAME"),
    ('budget(KV="2 GiB")', "memory_budget doesn't know 'KV'; budgets are peak, live, end, total,"),
    ('budget("2 GiB")', "memory_budget takes names: memory_budget(peak="),
    ("budget()", "memory_budget needs a budget, as in memory_budget(peak="),
    ('budget(peak="1 B", scope="call")', 'memory_budget(scope=\'call\'): write "test" or "body"'),
    ('budget(peak="1 B", warmup=-1)', "memory_budget(warmup=-1): write a whole number from 0 on"),
    ('budget(peak="1 B", phase=3)', "memory_budget(phase=3): phase is a name"),
    ('budget(end="1 B", phase="prefill")', "memory_budget(end=…) is about the end of a test"),
    ('budget(peak="1 B", tolerance="much")', "tolerance: 'much' is not a size;"),
    ("plateau(requests=4)", "memory_plateau needs slope, as in memory_plateau(requests=40,"),
    (
        'plateau(requests=0, slope="1 B/request")',
        "memory_plateau(requests=0): write a whole number",
    ),
    ('plateau(requests=4, slope="1 MiB")', "memory_plateau(slope='1 MiB'): write it as 1 MiB/100"),
    (
        'plateau(requests=4, slope="1 MB/s")',
        "memory_plateau(slope='1 MB/s'): write it as 1 MiB/100",
    ),
    ('plateau(requests=5, slope="1 B/request")', "memory_plateau(requests=5): 5 or more must be"),
    ('plateau(4, slope="1 B/request")', "memory_plateau takes names: memory_plateau(requests="),
]


def test_a_wrong_marker_is_its_test_s_own_error(pytester: pytest.Pytester) -> None:
    """In one sentence, without a stack trace; the others run."""
    source = "plateau = pytest.mark.memory_plateau\n"
    for number, (marker, _) in enumerate(WRONG):
        source += f"@{marker}\ndef test_{number}():\n    pass\n"
    source += f"@{WRONG[0][0]}\n@pytest.mark.skip\ndef test_skipped():\n    pass\n"
    source += "def test_another():\n    pass\n"
    result = run(pytester, source)
    result.assert_outcomes(errors=len(WRONG), passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    text = result.stdout.str()
    assert [message for _, message in WRONG if message not in text] == []
    assert "INTERNALERROR" not in text
    assert "Traceback" not in text and "memtrace/budgets" not in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("2 GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), (4096, 4096)],
)
def test_sizes(text: str | int, size: int) -> None:
    from memtrace.budgets.words import parse_budget

    (limit,) = parse_budget({"peak": text}).limits
    assert limit.allowed() == size


def test_plateau(pytester: pytest.Pytester) -> None:
    """Over runs of the body, or over the requests that it names; a leak is named."""
    source = """
plateau = pytest.mark.memory_plateau(requests=9, slope="1 MiB/100 requests")
LEVELS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

def serve(leak=0):
    with scopes.phase("prefill"), scopes.component("Hidden"):
        hidden = mib(1)
        if leak:
            KEPT.append(torch.empty(leak, dtype=torch.uint8))

@plateau
def test_clean():
    serve()

@plateau
def test_a_cache_that_fills_once():
    if len(KEPT) < 2:
        KEPT.append(mib(4))

@plateau
def test_garbage_is_no_leak():
    loop = [mib(1)]
    loop.append(loop)

@plateau
def test_leak():
    serve(leak=65536)

@plateau
def test_below_the_slope():
    serve(leak=10240)

@plateau
@budget(peak="1 MiB")
def test_requests_of_its_own():
    for n in range(14):
        with scopes.request(str(n), prompt_tokens=n % 3):
            serve(leak=65536)

@pytest.mark.memory_plateau(requests=40, slope="1 MiB/100 requests")
def test_a_leak_that_begins_late():
    for n in range(40):
        with scopes.request(str(n)):
            serve(leak=65536 * (n >= 26))

@plateau
def test_too_few():
    for n in range(7):
        with scopes.request(str(n)):
            serve()

@plateau
def test_undecided():
    KEPT[:] = [mib(LEVELS.pop())]
"""
    result = run(pytester, source, "-rA", "--memory-json=report.json")
    assert words(result) == {
        "test_clean": "PASSED",
        "test_a_cache_that_fills_once": "PASSED",
        "test_garbage_is_no_leak": "PASSED",
        "test_leak": "OVER",
        "test_below_the_slope": "PASSED",
        "test_requests_of_its_own": "OVER",
        "test_a_leak_that_begins_late": "OVER",
        "test_too_few": "FAILED",
        "test_undecided": "FAILED",
    }
    result.stdout.fnmatch_lines(
        [
            "allocated on cpu 64.0 KiB/request > 10.2 KiB/request (+53.8 KiB)",
            "* after the first request that counts, * after the last of 8 (+448.0 KiB)",
            "*a request  what stays",
            "* 64.0 KiB  Hidden * ×  prefill > aten.empty.memory_format",
            "*test_it.py:*:serve",
            "OVER BUDGET allocated on cpu 64.0 KiB/request * test_it.py::test_leak",
        ]
    )
    result.stdout.fnmatch_lines(["*memory_plateau wants 9 requests, the test made 7"])
    result.stdout.fnmatch_lines(["it is undecided whether allocated on cpu stays put*might decide"])


@pytest.mark.slow
def test_a_small_leak_is_found_and_clean_runs_are_not_blamed(pytester: pytest.Pytester) -> None:
    """64 KiB a request within 40 requests; fifty runs without a leak."""
    source = """
@pytest.mark.memory_plateau(requests=40, slope="16 KiB/request")
@pytest.mark.parametrize("leak, seed", [(65536, 0)] + [(0, n) for n in range(50)])
def test_it(leak, seed):
    lengths = torch.Generator().manual_seed(seed)
    for n in range(40):
        n_tokens = int(torch.randint(1, 9, (1,), generator=lengths))
        with scopes.request(str(n), prompt_tokens=n_tokens):
            kept = mib(n_tokens)
            if leak:
                KEPT.append(torch.empty(leak, dtype=torch.uint8))
"""
    found = words(run(pytester, source, "-rA"))
    assert len(found) == 51
    assert [name for name, word in found.items() if word != "PASSED"] == ["test_it[65536-0]"]
