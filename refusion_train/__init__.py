"""Pretraining of ReFusion language models: slot-level masked diffusion under causal attention (arXiv 2512.13586)."""

__version__ = "0.1.0"
