"""Memory and traffic: what `benchmarks/memory.py` measured on running engines, and what formulas say by hand."""

from __future__ import annotations

from typing import Any

import pytest

from refusion_train.config import Config
from refusion_train.plan import activations, plan
from refusion_train.plan.communication import ring
from refusion_train.plan.memory import REUSE_DISTANCE, StageMemory
from refusion_train.plan.planner import GIB, usable_bytes

ZERO3 = {"parallel.zero_stage": 3}
PP2 = {"parallel.pipeline": 2}
UNTIED = {"model.tie_embeddings": False}
SEQUENCE = {"parallel.tensor": 2, "parallel.sequence": True}
# ranks, changes, stage -> weights, optimizer, gradients, shard, activations: bytes of tensors of a real run.
MEASURED = [
    (2, {}, 0, (509_568, 1_528_704, 1_019_136, 509_568, 2_786_304)),
    (2, {"train.precision": "fp32"}, 0, (1_019_136, 1_528_704, 1_019_136, 567_040, 5_522_432)),
    (2, {"parallel.zero_stage": 2}, 0, (509_568, 1_528_704, 509_568, 509_568, 2_786_304)),
    (2, ZERO3, 0, (256_448, 1_528_704, 509_568, 509_568, 2_786_304)),
    (3, UNTIED | {"train.precision": "fp32"}, 0, (1_150_224, 1_150_224, 1_150_208, 443_648, 5_522_432)),
    (2, {"parallel.tensor": 2}, 0, (255_616, 1_533_696, 511_232, 511_232, 1_684_480)),
    (2, SEQUENCE | UNTIED | {"train.recompute": "selective"}, 0, (288_384, 1_730_304, 576_768, 576_768, 1_020_416)),
    (2, SEQUENCE | {"train.recompute": "full"}, 0, (255_616, 1_533_696, 511_232, 511_232, 98_816)),
    (2, PP2, 0, (287_488, 1_724_928, 574_976, 574_976, 2_768_896)),
    (2, PP2, 1, (287_616, 1_725_696, 575_232, 575_232, 1_418_240)),
    (2, PP2 | UNTIED | {"parallel.virtual_pipeline": 2}, 0, (287_488, 1_724_928, 574_976, 574_976, 3_502_080)),
    (2, PP2 | UNTIED | {"parallel.virtual_pipeline": 2}, 1, (287_616, 1_725_696, 575_232, 575_232, 2_135_040)),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "changes", "stage", "bytes_"), MEASURED)
def test_what_was_measured(ranks: int, changes: dict[str, Any], stage: int, bytes_: tuple[int, ...]) -> None:
    found = plan(_small(changes), ranks).memory[stage]
    assert (found.weights, found.optimizer, found.gradients, found.gradient_shard, found.activations) == bytes_


@pytest.mark.parametrize(
    ("ranks", "changes", "sent"),
    [
        (2, {}, {"zero reduce": 1_019_136, "zero gather": 254_784}),
        (2, {"parallel.zero_stage": 2}, {"zero": 6_369_600}),
        (2, ZERO3, {"zero": 4_581_952}),
        (2, {"parallel.tensor": 2}, {"tensor": 7_115_776}),
        (2, SEQUENCE | UNTIED | {"train.recompute": "selective"}, {"tensor": 8_690_944}),
        (2, SEQUENCE | {"train.recompute": "full"}, {"tensor": 11_836_672}),
        (2, PP2, {"pipeline": 393_216, "tied embeddings": 131_072}),
        (2, PP2 | UNTIED | {"parallel.virtual_pipeline": 2}, {"pipeline": 1_179_648}),
    ],
)
def test_traffic_that_was_measured(ranks: int, changes: dict[str, Any], sent: dict[str, int]) -> None:
    kinds = {kind.kind: kind.largest for kind in plan(_small(changes), ranks).traffic}
    if "zero" in sent:
        kinds = {"zero": kinds["zero reduce"] + kinds["zero gather"]}
    assert kinds == sent


def test_peaks_that_were_measured() -> None:
    """Within a few per cent, as the temporaries of kernels are not known to the byte."""
    for ranks, changes, stage, peak in (
        (2, {}, 0, 6_939_184), (2, {"train.precision": "fp32"}, 0, 9_967_280), (2, ZERO3, 0, 7_703_609),
        (2, {"parallel.zero_stage": 2}, 0, 6_819_852),
        (2, PP2, 0, 5_775_480), (2, PP2, 1, 5_199_808), (2, SEQUENCE | {"train.recompute": "full"}, 0, 3_075_152),
    ):  # fmt: skip
        planned = plan(_small(changes), ranks).memory[stage].phases["schedule"]
        assert planned == pytest.approx(peak, rel=0.07), f"{changes} stage {stage}"


def test_what_shrinks_with_data_parallel_ranks() -> None:
    one, four = (plan(_small({}), ranks).memory[0] for ranks in (1, 4))
    assert one.optimizer == pytest.approx(4 * four.optimizer, rel=1e-3)
    assert one.gradients == four.gradients
    assert plan(_small({"parallel.zero_stage": 2}), 4).memory[0].gradients == pytest.approx(one.gradients / 4, rel=1e-3)
    in_pipeline = [plan(_small(PP2 | {"parallel.zero_stage": stage}), 4).memory[0] for stage in (1, 2)]
    assert in_pipeline[0].gradients == in_pipeline[1].gradients == 2 * in_pipeline[0].gradient_shard


def test_activations_of_a_layer_by_hand() -> None:
    """T = 256 tokens of h = 64, a = 4, k = 2, d = 32, f = 160 in bf16."""
    config = _small({})
    kept = 2 * 256 * (4 * 64 + (12 + 6) * 32 + 3 * 160) + 4 * 256 * (4 + 6 + 2)
    assert activations.layer_bytes(config) == kept
    assert activations.layer_bytes(config, "full") == 2 * 256 * 64
    assert activations.layer_bytes(config, "selective") == 2 * 256 * (4 * 64 + 12 * 32 + 2 * 160) + 4 * 256 * 2
    split = _small(SEQUENCE)
    assert activations.layer_bytes(split, "selective") * 2 == activations.layer_bytes(config, "selective")


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 1), (4, 1), (2, 2), (4, 3), (8, 5)])
def test_passes_in_flight_are_those_of_the_schedule(pipeline: int, virtual: int) -> None:
    config = _small({"parallel.pipeline": pipeline, "parallel.virtual_pipeline": virtual})
    first = activations.passes_in_flight(config, 0, micro_batches=1000)
    last = activations.passes_in_flight(config, pipeline - 1, micro_batches=1000)
    model = pipeline * virtual
    assert first / model == pytest.approx(1 + (pipeline - 1) / model if virtual > 1 else 1)  # arXiv 2205.05198, 4.2.3
    assert last == (virtual - 1) * pipeline + 1
    assert activations.passes_in_flight(config, 0, micro_batches=1) == virtual


def test_a_single_micro_batch_needs_no_gradients_beside_its_activations() -> None:
    many, one = (_small({"train.global_batch_size": rows}) for rows in (24, 2))
    difference = plan(many, 1).memory[0].phases["schedule"] - plan(one, 1).memory[0].phases["schedule"]
    batches = plan(many, 1).memory[0].batches - plan(one, 1).memory[0].batches
    assert difference == plan(one, 1).memory[0].gradients + batches


def test_only_the_ends_of_a_pipeline_hold_embedding_and_head() -> None:
    config = _small({"parallel.pipeline": 4, "model.num_layers": 8})
    first, second, third, last = plan(config, 4).memory
    assert first.weights > second.weights == third.weights < last.weights
    assert not any(stage.logits or stage.head for stage in (first, second, third)) and last.logits and last.head
    assert first.activations > second.activations > third.activations


def test_zero3_keeps_a_bounded_part_of_a_large_model() -> None:
    config = _small(ZERO3 | {"model.hidden_size": 4096, "model.num_layers": 64, "model.ffn_size": 16384})
    memory = plan(config, 6).memory[0]
    whole = 2 * plan(config, 6).parameters.total
    assert memory.weights == pytest.approx(whole / 6, rel=0.01)
    assert 2 * REUSE_DISTANCE // 2 < memory.gathered < whole / 4


def test_what_does_not_fit_is_said() -> None:
    config = _small({})
    need = plan(config, 1).peak
    assert plan(config, 1).fits is None
    assert plan(config, 1, gpu_memory_gib=80).fits
    assert not plan(config, 1, gpu_memory_gib=1.5 + need / GIB).fits  # nothing left for the allocator
    assert usable_bytes(80) == pytest.approx(0.95 * 78.5 * GIB)


def test_peak_is_that_of_the_largest_phase() -> None:
    memory = plan(_small({}), 1).memory[0]
    assert isinstance(memory, StageMemory)
    assert memory.peak == memory.phases[memory.peak_phase] == max(memory.phases.values())
    assert set(memory.phases) == {"start", "schedule", "reduction", "update"}
    early = plan(_small({"parallel.zero_stage": 2}), 1).memory[0]
    assert set(early.phases) == {"start", "schedule", "update"}


def test_ring() -> None:
    assert [ring(12, ranks) for ranks in (1, 2, 3, 4)] == [0, 6, 8, 9]


def _small(changes: dict[str, Any]) -> Config:
    """The model of `benchmarks/memory.py`: padded rows in the vocabulary, sizes that shards do not divide."""
    config = Config()
    model = config.model
    model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim = 64, 4, 4, 2, 32
    model.ffn_size, model.vocab_size, model.max_sequence_length = 160, 500, 128
    config.data.sequence_length, config.data.streams = 128, 12
    config.train.micro_batch_size, config.train.global_batch_size = 2, 24
    for key, value in changes.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config
