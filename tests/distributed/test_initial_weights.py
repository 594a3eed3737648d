"""A run of any layout starts from a Hugging Face folder, or from an import of it, with exactly its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "convert"))
from hf_models import ROWS, equal, hf_model, save, tensors

LAYOUT = {"tensor": 2, "pipeline": 2}


def through(start: str, save_to: str, layout: dict[str, Any], mask_id: int | None) -> tuple[int, list[str]]:
    """Start on a layout, save, and return the optimizer's steps and the moments that are not 0."""
    from refusion_train.checkpoint import layout as logical
    from refusion_train.checkpoint import store
    from refusion_train.config import Config, SourceConfig
    from refusion_train.convert.source import Source
    from refusion_train.model.slot_model import build_model_chunks
    from refusion_train.parallel.engine import Engine
    from refusion_train.parallel.groups import destroy, init_groups
    from refusion_train.train import initial
    from refusion_train.train.optim import param_groups
    from refusion_train.train.state import TrainState, describe_run

    config = Config(run_dir=save_to)
    folder = Path(start)
    found = Source(start).model if (folder / "config.json").is_file() else _model_of(folder)
    found.init_from, found.vocab_size, found.vocab_multiple = start, None, 128
    config.model = found
    config.data.sequence_length, config.data.streams, config.train.precision = 64, 8, "fp32"
    config.objective.name = "ar" if mask_id is None else "slots"
    for name, value in layout.items():
        setattr(config.parallel, name, value)
    special = {} if mask_id is None else {"mask": mask_id}
    index = SimpleNamespace(vocab_size=ROWS + len(special), special_ids=special, tokenizer={})
    initial.settle_model(config, index)  # type: ignore[arg-type]
    groups = init_groups(config)
    chunks = build_model_chunks(config, groups, bidirectional=False)
    engine = Engine(config, groups, chunks, param_groups(chunks, 0.1))
    initial.load_weights(engine, config, index)  # type: ignore[arg-type]
    parts = logical.tensors_to_save(engine)
    moved = [name for name, entry in parts.items() if ".exp_" in name and any(p.any() for p in entry.parts.values())]
    dataset = SimpleNamespace(location=".", fingerprint="", index=index)
    sources = [SimpleNamespace(name="", dataset=dataset, config=SourceConfig("."))]
    state = describe_run(TrainState(cursor=SimpleNamespace(to_dict=dict)), config, sources)  # type: ignore[arg-type]
    store.save(save_to, 0, parts, {**state, "imported": {"config": {}}}, keep=1)
    steps = engine.optimizer_steps
    destroy()
    return steps, moved


def _model_of(folder: Path) -> Any:
    from refusion_train.convert.export import read_checkpoint

    return read_checkpoint(str(folder)).model


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("qwen2", False, LAYOUT),
        ("qwen3", True, LAYOUT),
        ("llama", True, {"tensor": 2, "sequence": True, "zero_stage": 2}),
        ("qwen2", True, {"zero_stage": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_weights_come_back_to_the_bit(family: str, tied: bool, layout: dict[str, Any], tmp_path: Path) -> None:
    from refusion_train.convert.export import export_checkpoint
    from refusion_train.convert.importer import import_folder

    source = save(hf_model(family, tied), tmp_path / "source")
    start = source
    if layout == LAYOUT:
        import_folder(str(source), str(tmp_path / "imported"))
        start = tmp_path / "imported"
    processes = 4 if layout == LAYOUT else 2
    for steps, moved in run(through, processes, str(start), str(tmp_path / "run"), layout, None):
        assert steps == 0 and not moved
    export_checkpoint(str(tmp_path / "run"), str(tmp_path / "back"), dtype="float32")
    assert equal(source, tmp_path / "back")


def test_a_mask_token_is_given_its_row_on_every_rank(tmp_path: Path) -> None:
    from refusion_train.convert.export import export_checkpoint

    source = save(hf_model("qwen3", tied=True), tmp_path / "source")
    run(through, 4, str(source), str(tmp_path / "run"), LAYOUT, ROWS)
    export_checkpoint(str(tmp_path / "run"), str(tmp_path / "back"), dtype="float32")
    before, after = tensors(source), tensors(tmp_path / "back")
    embedding, wanted = after.pop("model.embed_tokens.weight"), before.pop("model.embed_tokens.weight")
    assert embedding.shape[0] == ROWS + 1 and embedding[:ROWS].equal(wanted)
    assert torch.allclose(embedding[ROWS], wanted.mean(dim=0), atol=1e-6)
    assert before.keys() == after.keys() and all(value.equal(after[name]) for name, value in before.items())
