from hypothesis import given
from hypothesis import strategies as st

from memtrace.allocator.metadata import Names, birth_text, retag_text
from tests.synthetic import LABELS

paths = st.lists(st.tuples(st.sampled_from(["phase", "layer", "module"]), st.text()), max_size=4)


class Books:
    def __init__(self) -> None:
        self.scopes: list[tuple[int, str, str]] = [(-1, "process", "")]
        self.stacks: list[tuple[str, ...]] = []

    def scope(self, parent: int, kind: str, name: str) -> int:
        self.scopes.append((parent, kind, name))
        return len(self.scopes) - 1

    def stack(self, frames: tuple[str, ...]) -> int:
        self.stacks.append(frames)
        return len(self.stacks) - 1

    def path(self, scope: int) -> list[tuple[str, str]]:
        path: list[tuple[str, str]] = []
        while scope:
            scope, kind, name = self.scopes[scope]
            path.insert(0, (kind, name))
        return path


@given(st.sampled_from(LABELS), paths)
def test_a_birth_reads_back(component: str, path: list[tuple[str, str]]) -> None:
    books = Books()
    found, scope = Names(books).birth(birth_text(component, path))
    assert (found, books.path(scope)) == (component, path)


@given(st.sampled_from(LABELS), paths, st.none() | st.lists(st.sampled_from(LABELS), min_size=1))
def test_a_retag_reads_back(component: str, path: list, only: list[str] | None) -> None:
    books = Books()
    found = Names(books).retag(retag_text(component, path, only))
    assert found is not None
    assert (found.component, books.path(found.scope)) == (component, path)
    assert found.only == (None if only is None else tuple(only))


@given(st.text().filter(lambda text: not text.startswith("memtrace>")) | st.just("memtrace<"))
def test_any_other_text_is_kept_and_claims_nothing(text: str) -> None:
    books = Books()
    names = Names(books)
    component, scope = names.birth(text)
    assert component == "other"
    assert books.path(scope) == ([("tag", text)] if text else [])
    assert names.retag(text) is None


def test_a_retag_applies_from_what_it_names() -> None:
    retag = Names(Books()).retag(retag_text("KV_res/full", [], ("Act", "Temp/scores")))
    assert retag is not None
    assert [retag.applies(one) for one in ("Act", "Act/qkv", "Temp/scores")] == [True] * 3
    assert [retag.applies(one) for one in ("Temp", "KV_res/full", "model")] == [False] * 3


def test_hidden_frames_and_deep_ones_are_left_out() -> None:
    books = Books()
    frames = [
        {"filename": name, "line": number, "name": "run"}
        for number, name in enumerate(("/torch/_ops.py", "/a.py", "/b.py", "/c.py"))
    ]
    Names(books, hidden=("/torch",), depth=2).stack(frames)
    assert books.stacks == [("/a.py:1:run", "/b.py:2:run")]
