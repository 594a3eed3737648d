"""Every layout of ranks trains the same model as plain torch on one process, and begins with the same weights.

10 steps with clipping in float32, grouped queries, q/k norm: losses and gradient norms within 1e-5, final weights
within 1e-4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from processes import run
from tiny import Curve, assemble, distance, layout_of, processes_of, reference, tiny_config, train

from refusion_train.model.slot_model import build_model_chunks
from refusion_train.parallel.groups import destroy, init_groups
from refusion_train.parallel.reduce import PartialGradients

# Of each, tied and untied.
LAYOUTS = [
    "tp2", "tp2 sp", "pp2", "pp2 vp2", "pp4", "tp2 pp2",
    *(f"{words} zero{stage}" for words in ("tp2 dp2", "pp2 dp2") for stage in (1, 2)), "tp2 dp2 zero3",
    "tp2 pp2 dp2 zero1 rows1", "tp2 pp2 dp2 zero2 rows1",
]  # fmt: skip
# Everything at once, uneven stages, recomputation; `rows4` is two micro-batches per step instead of four.
MORE = [
    "tp2 zero3 rows4", "tp2 sp zero2 rows4 untied", "tp2 sp dp2 zero3", "tp2 sp pp2 vp2 rows4",
    "tp2 sp pp2 vp2 dp2 zero2 rows1 untied",
    "pp2 first3 last1", "pp2 last3 untied", "pp2 vp2 layers6 first4", "pp2 vp2 layers6 first2 last4 untied",
    "pp4 layers6 first1 last1", "tp2 pp2 last1 rows4 untied",
    "tp2 sp selective rows4", "tp2 sp full rows4 untied", "pp2 vp2 selective untied", "pp2 vp2 full",
    "pp2 first3 full", "tp2 pp2 selective rows4", "tp2 dp2 zero3 full untied", "pp2 dp2 zero2 full",
]  # fmt: skip
# What `make test` runs; the rest, which has the same code in other combinations, is `make matrix`.
EVERYDAY = {"tp2", "tp2 sp untied", "pp2 untied", "pp2 vp2", "pp4", "tp2 pp2", "tp2 dp2 zero3", "pp2 first3 last1"}


def _cases(every: list[str]) -> list[Any]:
    """The layouts as parameters of a test, those that are not of every day marked."""
    return [pytest.param(words, marks=() if words in EVERYDAY else pytest.mark.matrix) for words in every]


@pytest.mark.parametrize("words", _cases([f"{words}{end}" for words in LAYOUTS for end in ("", " untied")] + MORE))
def test_every_layout_agrees_with_plain_torch(words: str) -> None:
    layout = layout_of(words)
    curve, weights = distance(run(train, processes_of(words), tiny_config(**layout)), layout)
    assert curve < 1e-5, "losses or gradient norms differ"
    assert weights < 1e-4, "final weights differ"


@pytest.mark.parametrize(
    "words", _cases(["tp2 pp2 rows4", "pp2 vp2", "tp2 sp dp2 zero2", "tp2 dp2 zero3", "pp2 first1 dp2 zero2"])
)
def test_bf16_follows_the_float32_curve(words: str) -> None:
    results = run(train, processes_of(words), tiny_config(**layout_of(words), train__precision="bf16"))
    assert all(np.array_equal(result.curve, results[0].curve) for result in results), "ranks disagree"
    assert np.abs(results[0].curve - reference()[0]).max() < 2e-2


# ------------------------------------------------------------------------------------------- a fault that must show


def _train_without_sums_of_norms(config: Any) -> Curve:
    """Without the sums over tensor-parallel ranks of the gradients of q/k norms; others, if any, are made."""
    whole = PartialGradients.__init__

    def without_heads(self: PartialGradients, parameters: Any, groups: Any) -> None:
        head_dim = config.model.head_dim
        whole(self, [p for p in parameters if p.shape != (head_dim,)], groups)

    PartialGradients.__init__ = without_heads  # in this process only
    return train(config)


@pytest.mark.parametrize("words", _cases(["tp2", "tp2 pp2", "tp2 zero3 rows4"]))
def test_without_the_sum_of_qk_norm_gradients_the_matrix_fails(words: str) -> None:
    results = run(_train_without_sums_of_norms, processes_of(words), tiny_config(**layout_of(words)))
    curve, weights = distance(results, layout_of(words))
    assert curve > 1e-4 and weights > 1e-3


# --------------------------------------------------------------------------------------------------- initial weights


Parts = dict[str, list[tuple[tuple[int, ...], tuple[slice, ...], torch.Tensor]]]


def _initial(configs: list[Any]) -> list[Parts]:
    """Shape, place and values of every part of a logical tensor on this rank, of models on the same layout."""
    groups, found = init_groups(configs[0]), []
    for config in configs:
        parts: Parts = {}
        for chunk in build_model_chunks(config, groups, bidirectional=False):
            parameters = dict(chunk.named_parameters())
            for name, pieces in chunk.pieces().items():
                for piece in pieces:
                    values = piece.take(parameters[name].detach()).clone()
                    parts.setdefault(piece.name, []).append((piece.shape, piece.slices, values))
        found.append(parts)
    destroy()
    return found


def test_initial_weights_are_the_same_bits_in_every_layout() -> None:
    models = [
        {"model__tie_embeddings": tied, "model__num_layers": 8, "train__precision": precision}
        for tied in (True, False)
        for precision in ("fp32", "bf16")
    ]
    (whole,) = run(_initial, 1, [tiny_config(**model) for model in models])
    for words in ("tp2 sp", "pp4", "pp2 vp2", "tp2 pp2", "pp4 first1 last1", "pp2 vp2 first2"):
        ranks = run(_initial, processes_of(words), [tiny_config(**model, **layout_of(words)) for model in models])
        for number, expected in enumerate(whole):
            seen = {name: torch.zeros(parts[0][0], dtype=torch.bool) for name, parts in expected.items()}
            for name, parts in (item for rank in ranks for item in rank[number].items()):
                for _, slices, values in parts:
                    assert torch.equal(values, expected[name][0][2][slices]), f"{words}: {name}"
                    seen[name][slices] = True
            assert all(found.all() for found in seen.values()), f"{words}: parts are missing"


def test_assembling_sees_what_is_missing() -> None:
    """The comparison of weights is over all of them: a rank's part that is lost is noticed."""
    results = run(train, 2, tiny_config(**layout_of("tp2")), 0, 1)
    with pytest.raises(AssertionError, match="saved 0 to 1 times"):
        assemble(results[:1])
