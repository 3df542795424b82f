"""What a trace has booked, as tests compare it."""

from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import Action


def booked(process: ProcessTrace) -> list[tuple[Action, str, int, str]]:
    """(action, component, bytes, operator) of every event."""
    contexts, scopes_ = process.contexts, process.scopes
    return [
        (
            Action(int(contexts["action"][context])),
            contexts["component"][context],
            int(size),
            scopes_["name"][contexts["scope"][context]],
        )
        for size, context in zip(process.events["bytes"], process.events["context"], strict=True)
    ]


def allocations(process: ProcessTrace) -> list[tuple[str, int]]:
    return [(name, size) for action, _, size, name in booked(process) if action == Action.ALLOC]
