"""What a run will hold, compute, send and take, from its configuration alone: no GPU, no torch, an answer in a second.

`plan` and `suggest` calculate, `render` and `render_suggestions` print. Every formula stands with its source in the
docstring of the function that has it; docs/planning.md says how close they are.
"""

from refusion_train.plan.mixture import mixed
from refusion_train.plan.planner import Plan, plan
from refusion_train.plan.report import render, render_suggestions
from refusion_train.plan.suggest import Suggestion, suggest

__all__ = ["Plan", "Suggestion", "mixed", "plan", "render", "render_suggestions", "suggest"]
