import torch

from memtrace.record.mode import Mode


class _Counting(Mode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_isnt_taken_out_within_inference_mode():
    mode = _Counting()
    mode.__enter__()
    with torch.inference_mode():
        assert not mode.leave()
    torch.zeros(2)[0, ...]
    assert mode.seen
    assert mode.leave()
    seen = mode.seen
    torch.zeros(2)[0, ...]  # PyTorch fails here where it looks for a mode that is gone
    assert mode.seen == seen


def test_a_mode_entered_within_inference_mode_is_taken_out_there():
    with torch.inference_mode():
        mode = _Counting()
        mode.__enter__()
        assert mode.leave()
    torch.zeros(2)[0, ...]
