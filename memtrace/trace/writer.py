"""Append rows to a trace."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from memtrace.trace.schema import TABLES

#: Rows of a batch that is made of Python's objects.
_BATCH = 1 << 13
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)


def _array(values: Sequence[Any] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """``pa.array()`` for the types of our tables.

    The real one looks for pandas and so imports it, 40 MiB of it, into the recorded process.
    """
    if isinstance(values, np.ndarray):
        data = np.ascontiguousarray(values, np.dtype(str(kind)))
        return pa.Array.from_buffers(kind, len(data), [None, pa.py_buffer(data)])
    valid = np.array([value is not None for value in values])
    bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if pa.types.is_integer(kind):
        data = np.array([value or 0 for value in values], np.dtype(str(kind)))
        return pa.Array.from_buffers(kind, len(values), [bitmap, pa.py_buffer(data)])
    text = pa.types.is_string(kind)
    items: list[Any] = [(value or "").encode() if text else value or () for value in values]
    offsets = pa.py_buffer(np.cumsum([0, *map(len, items)], dtype=np.int32))
    if text:
        return pa.Array.from_buffers(
            kind, len(values), [bitmap, offsets, pa.py_buffer(b"".join(items))]
        )
    children = [_array([part for item in items for part in item], kind.value_type)]
    return pa.Array.from_buffers(kind, len(values), [bitmap, offsets], children=children)


class TableWriter:
    """The tables of one folder, each an Arrow stream that is created with its first row.

    Each :meth:`append` is one batch and reaches the operating system before it returns, so what
    was appended survives the death of the process. Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, pa.OSFile] = {}
        self._streams: dict[str, pa.RecordBatchStreamWriter] = {}

    def append(self, table: str, columns: Mapping[str, Sequence[Any] | Any]) -> None:
        """Append one batch; ``columns`` maps each column's name to a sequence or NumPy array.

        Raises:
            OSError: the disk is full or the folder is gone.
        """
        schema = TABLES[table]
        arrays = [_array(columns[field.name], field.type) for field in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if batch.num_rows == 0:
            return
        if table not in self._streams:
            self._files[table] = pa.OSFile(str(self._folder / f"{table}.arrow"), "wb")
            self._streams[table] = pa.ipc.new_stream(self._files[table], schema, options=_OPTIONS)
        self._streams[table].write_batch(batch)

    def append_rows(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append rows in the order of the schema's columns, a batch of some thousands at a time.

        Raises:
            OSError: the disk is full or the folder is gone.
        """
        for start in range(0, len(rows), _BATCH):
            columns = zip(*rows[start : start + _BATCH], strict=True)
            self.append(table, dict(zip(TABLES[table].names, columns, strict=True)))

    def close(self) -> None:
        """End every stream properly."""
        for stream in self._streams.values():
            stream.close()
        for file in self._files.values():
            file.close()
        self._streams.clear()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
