"""A tensor of which this process holds some rectangles, in the form that torch.distributed.checkpoint (DCP) takes.

DCP asks an entry for the chunks that it holds (`__create_chunk_list__`), what to write of them
(`__create_write_items__`) and for one of them by its offset (`__get_tensor_shard__`); it then writes them, or reads
whatever stored chunks overlap with them, however these were cut. DTensor would need one device mesh and equal cuts;
ZeRO cuts matrices in the middle of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Offsets = tuple[int, ...]


class ShardedEntry(torch.Tensor):
    """Rectangles of a float32 tensor of shape `size()`, by the offsets of their first elements.

    The rectangles are views into memory of others (an optimizer's): saving reads them, loading writes into them.
    The tensor has no data of its own and takes part in no operation.
    """

    _parts: dict[Offsets, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], parts: dict[Offsets, torch.Tensor]) -> ShardedEntry:
        entry = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=torch.float32)  # type: ignore[attr-defined]
        entry._parts = parts
        for offsets, part in parts.items():
            inside = all(o >= 0 and o + n <= limit for o, n, limit in zip(offsets, part.shape, shape, strict=True))
            assert inside, f"a part of shape {tuple(part.shape)} at {offsets} does not lie in {shape}"
        return entry

    def __init__(self, shape: tuple[int, ...], parts: dict[Offsets, torch.Tensor]) -> None:
        super().__init__()

    @property
    def parts(self) -> dict[Offsets, torch.Tensor]:
        """Offsets of the first element in the whole tensor -> rectangle."""
        return self._parts

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on a tensor of which only some rectangles are here")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedEntry({tuple(self.shape)}, {[(o, tuple(p.shape)) for o, p in self._parts.items()]})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self._parts.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=torch.float32), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, f"{index.fqn} is asked for without an offset"
        return self._parts[tuple(index.offset)]
