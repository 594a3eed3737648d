"""Any stretch of a rank's parameter lands where it belongs in the logical tensors, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from refusion_train.checkpoint.layout import intervals, rectangles
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.checkpoint.snapshot import HostMemory
from refusion_train.config import ModelConfig
from refusion_train.convert.names import pieces

MODEL = ModelConfig(
    hidden_size=6, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=2, ffn_size=4, vocab_size=7, vocab_multiple=4
)
PARAMETERS = [
    "embedding.weight",
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
]


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32).view(shape)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_cut_puts_every_element_in_its_place(name: str, tp_size: int):
    for tp_rank in range(tp_size):
        parts = pieces(name, MODEL, tp_rank, tp_size, layer_offset=0)
        block_rows = max(piece.stop for piece in parts)
        parameter = torch.zeros(parts[0].groups * block_rows, *parts[0].local_shape[1:])
        full = {piece.name: _numbered(piece.shape) + 1000 * index for index, piece in enumerate(parts)}
        for piece in parts:
            piece.put(parameter, full[piece.name][piece.slices])
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), 5):
            for count in (1, 4, 5, 13, 29, flat.numel() - start):
                if start + count <= flat.numel():
                    _check_stretch(parts, block_rows, full, flat, start, count)


def _check_stretch(parts, block_rows, full, flat, start, count):
    covered = 0
    for piece in parts:
        seen = torch.zeros(piece.shape)
        for begin, end, at in intervals(piece, block_rows, start, count):
            for offsets, part in rectangles(piece, at, flat[start : start + count][begin:end]):
                place = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                assert torch.equal(part, full[piece.name][place]), f"{piece.name} {place}"
                assert part.data_ptr() >= flat.data_ptr(), "not a view"
                seen[place] += 1
                covered += part.numel()
        assert seen.max() <= 1, "an element twice"
    assert covered == count, "elements are missing"


def test_a_stretch_makes_at_most_three_rectangles():
    (piece,) = pieces("embedding.weight", MODEL, 0, 1, 0)
    shapes = [tuple(part.shape) for _, part in rectangles(piece, 4, torch.zeros(2 + 12 + 3))]
    assert shapes == [(1, 2), (2, 6), (1, 3)]


def test_checkpoints_are_read_through_other_cuts(tmp_path):
    whole = _numbered((4, 6))
    cuts = {(0, 0): whole[:1], (1, 0): whole[1:2, :4], (1, 4): whole[1:2, 4:], (2, 0): whole[2:]}
    save({"w": ShardedEntry((4, 6), {k: v.clone() for k, v in cuts.items()})}, checkpoint_id=tmp_path)
    memory = torch.zeros(4, 6)
    others = {(0, 0): memory[:, :3], (0, 3): memory[:3, 3:]}
    load({"w": ShardedEntry((4, 6), others)}, checkpoint_id=tmp_path)
    assert torch.equal(memory[:, :3], whole[:, :3])
    assert torch.equal(memory[:3, 3:], whole[:3, 3:])
    assert not memory[3, 3:].any(), "read into memory that was not asked for"
    plain = {"w": torch.zeros(4, 6)}
    load(plain, checkpoint_id=tmp_path)
    assert torch.equal(plain["w"], whole)


def test_another_shape_is_noticed(tmp_path):
    save({"w": ShardedEntry((1, 2), {(0, 0): torch.ones(1, 2)})}, checkpoint_id=tmp_path / "whole")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"w": ShardedEntry((2, 2), {(0, 0): torch.ones(2, 2)})}, checkpoint_id=tmp_path / "whole")
    with pytest.raises(AssertionError, match="does not lie in"):
        ShardedEntry((2, 2), {(1, 0): torch.ones(2, 2)})


def test_a_snapshot_has_its_own_memory():
    live = torch.ones(2, 2)
    kept = HostMemory().take({"w": ShardedEntry((2, 2), {(0, 0): live})})["w"]
    live.zero_()
    assert kept.parts[0, 0].sum() == 4
    assert tuple(kept.shape) == (2, 2)
