"""Linear layers of TransformerEngine, where they are asked for: refused where they cannot be, else the same model."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from model_cases import make_batch, make_config

from refusion_train.errors import ConfigError
from refusion_train.model import mcore
from refusion_train.model.batch import to_device
from refusion_train.model.layers import SwiGLU
from refusion_train.model.slot_model import build_model_chunks
from refusion_train.parallel.groups import Groups, init_groups

INSTALLED = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(INSTALLED and torch.cuda.is_available(), reason="it can be used here")
def test_asked_for_in_vain_it_is_refused_before_any_group() -> None:
    config = make_config()
    config.parallel.linear = "transformer_engine"
    with pytest.raises(ConfigError, match=r"parallel\.linear=transformer_engine needs .*; use parallel\.linear=torch$"):
        init_groups(config)


class _Recorded(torch.nn.Module):
    """Remembers how it was built."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__()
        self.options = options


@pytest.mark.parametrize(
    ("name", "part"), [("TEColumnParallelLinear", "linear_fc1"), ("TERowParallelLinear", "linear_fc2")]
)
def test_the_feed_forward_part_builds_them_with_all_that_they_ask_for(groups: Groups, name: str, part: str) -> None:
    """Their class cannot be imported without TransformerEngine; its source says what it takes."""
    source = Path(megatron.core.__path__[0], "extensions", "transformer_engine.py").read_text()
    (kind,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    (init,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    required = {
        argument.arg
        for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
        if default is None
    }
    kinds = type("Kinds", (SwiGLU,), {"column": _Recorded, "row": _Recorded})
    given = set(getattr(kinds(mcore.transformer_config(make_config())), part).options)
    assert required and required <= given <= {argument.arg for argument in init.args.kwonlyargs}


@pytest.mark.gpu
@pytest.mark.skipif(not (INSTALLED and torch.cuda.is_available()), reason="needs TransformerEngine and a CUDA device")
@pytest.mark.parametrize("qk_norm", [True, False])
def test_it_computes_the_same_model(groups: Groups, qk_norm: bool) -> None:
    """Names, initial weights, loss and gradients; what it keeps beside its parameters is in no checkpoint."""
    found: dict[str, Any] = {}
    for linear in ("torch", "transformer_engine"):
        config = make_config(qk_norm=qk_norm, qkv_bias=not qk_norm)
        config.parallel.linear, config.train.precision = linear, "bf16"
        (model,) = build_model_chunks(config, groups, bidirectional=False)
        batch = make_batch()
        loss, _ = model(to_device(batch, batch.loss_weight, groups.device))
        loss.backward()
        found[linear] = model, loss.item(), model.pieces()
    (model, loss, pieces), (other, other_loss, other_pieces) = found.values()
    assert other_pieces == pieces and other_loss == pytest.approx(loss, rel=1e-2)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        torch.testing.assert_close(theirs.grad, mine.grad, atol=2e-2, rtol=5e-2, msg=name)
