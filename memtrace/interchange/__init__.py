"""Other tools' formats: snapshots of PyTorch's allocator, in and out."""
