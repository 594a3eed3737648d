"""Causal language models of transformers whose `generate` decodes slots.

Loaded with `AutoModelForCausalLM.from_pretrained(dir, trust_remote_code=True)`. The weights, names and `forward`
are those of the stock class (Qwen3, Qwen2 or Llama), so without remote code the same folder is the stock model; only
`generate` differs. `config.refusion` says how the model was trained: objective, mask token, slot sizes.

This file is copied into every exported folder: it imports torch, transformers and its neighbours only.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import ModelOutput

# transformers before 5 copies only what this file imports itself: all neighbours are named here.
from .baselines import LeftToRightDecoder  # noqa: F401
from .cache import KeyValueCache  # noqa: F401
from .corruption import Masking
from .decoding import SlotDecoder  # noqa: F401
from .likelihood import Likelihood, likelihood
from .runner import Decoded, Update, decode
from .settings import Settings

# What each objective's models can be decoded with; the first is the default.
DECODINGS_OF = {"slots": ("plan_and_infill", "left_to_right"), "ar": ("left_to_right",), "mdm": ("mdm",)}
_OPTIONS = tuple(f.name for f in dataclasses.fields(Settings) if f.name not in ("mask_id", "end_ids"))
# Arguments of GenerationMixin that change nothing at these values; any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "return_dict": (True, None),
    "top_k": (0, None),
    "repetition_penalty": (1.0, None),
    "length_penalty": (1.0, None),
    "early_stopping": (False, None),
    "no_repeat_ngram_size": (0, None),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "output_scores": (False, None),
    "output_logits": (False, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "synced_gpus": (False, None),
    "logits_processor": (None,),
    "assistant_model": (None,),
    "prefix_allowed_tokens_fn": (None,),
    "negative_prompt_ids": (None,),
    "negative_prompt_attention_mask": (None,),
    "bos_token_id": (None,),
}


@dataclass
class ReFusionOutput(ModelOutput):
    """What `generate(..., return_dict_in_generate=True)` returns.

    sequences: int64 [batch, prompt + longest response], padded on the right; forwards, query_tokens, new_tokens:
    int64 [batch]; tokens_per_forward: float64 [batch], emitted tokens (end token included) over all forwards.
    """

    sequences: Tensor | None = None
    forwards: Tensor | None = None
    query_tokens: Tensor | None = None
    new_tokens: Tensor | None = None
    tokens_per_forward: Tensor | None = None


class SlotGeneration:
    """`generate` of a model trained on slots, left to right, or by masked diffusion; a mixin before the stock class."""

    # Of the last call of generate: rows, forwards, query_tokens, new_tokens, tokens_per_forward, seconds.
    last_stats: dict[str, Any] | None = None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The stock forward; positions in any order are taken as positions, and mdm models see both ways.

        Without a mask transformers reads positions that do not rise by one as packed sequences: it gets one.
        """
        shaped = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
        if attention_mask is None and position_ids is not None and shaped is not None and not cached:
            attention_mask = torch.ones(shaped.shape[:2], dtype=torch.long, device=shaped.device)
        if _trained(self.config)["objective"] == "mdm" and shaped is not None:  # type: ignore[attr-defined]
            attention_mask = _both_ways(shaped, attention_mask, self.dtype)  # type: ignore[attr-defined]
            kwargs["use_cache"] = False
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        stopping_criteria: Any = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        on_update: Callable[[Update], None] | None = None,
        return_dict_in_generate: bool | None = None,
        **options: Any,
    ) -> Tensor | ReFusionOutput:
        """Continue each row of `input_ids` [batch, tokens]; returns prompts and responses [batch, longest].

        attention_mask [batch, tokens]: 0 at padding (on either side); rows are decoded together, each for itself.
        options: those of `Settings` (decoding, max_new_tokens, slot_size, num_blocks, slot_threshold, token_threshold,
        correction, exact_kv, first_from_ar, temperature, top_p, seed, steps, confidence_threshold) and, as in
        transformers, max_length, do_sample, eos_token_id, pad_token_id. What is not given is taken from the generation
        configuration; a max_new_tokens of there is shortened to the positions that the model has.
        streamer: put/end as in transformers, fed with the tokens that stand without a gap behind the prompt (batch of
        one). stopping_criteria, stop_strings (these need `tokenizer`): as in transformers; they are asked for every
        prefix of the responses, and these are cut there. on_update: called after every forward with an `Update`, the
        partly filled response.
        Raises ValueError for an unknown option or a value that cannot work.
        """
        ids = input_ids if input_ids is not None else inputs
        if ids is None or ids.dim() != 2:
            raise ValueError("generate needs input_ids of shape [batch, tokens]")
        if streamer is not None and len(ids) != 1:
            raise ValueError(f"a streamer shows one sequence, and the batch has {len(ids)}")
        if streamer is not None and (stopping_criteria or stop_strings):
            raise ValueError("a streamer shows tokens before stopping_criteria are asked; leave one of them out")
        defaults = generation_config if generation_config is not None else self.generation_config  # type: ignore[attr-defined]
        criteria = _criteria(stopping_criteria, stop_strings, tokenizer)
        prompts = _prompts(ids, attention_mask)
        longest = max(map(len, prompts), default=0)
        settings, pad_id = _resolve(self.config, defaults, ids.shape[1], longest, options)  # type: ignore[attr-defined]
        watch = _watcher(streamer, on_update)
        if streamer is not None:
            streamer.put(ids.cpu())
        began = time.perf_counter()
        decoded = decode(self, prompts, settings, watch)
        if criteria is not None:
            _cut(decoded, ids, criteria, pad_id)
        self.last_stats = _stats(decoded, time.perf_counter() - began)
        if streamer is not None:
            _finish_stream(streamer, watch, decoded[0])
        longest = max(len(one.tokens) for one in decoded)
        padded = [one.tokens + [pad_id] * (longest - len(one.tokens)) for one in decoded]
        sequences = torch.cat([ids, torch.tensor(padded, dtype=ids.dtype, device=ids.device)], dim=1)
        wants_dict = return_dict_in_generate
        if wants_dict is None:
            wants_dict = bool(getattr(defaults, "return_dict_in_generate", False))
        return _output(sequences, decoded) if wants_dict else sequences

    def likelihood(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        prompt_length: int | list[int] = 0,
        documents: list[int] | None = None,
    ) -> list[Likelihood]:
        """How likely each row of `input_ids` [batch, tokens] is: left to right, NELBO and in-slot AR, in nats.

        attention_mask: 0 at padding. prompt_length: tokens of each row (padding not counted) that are given; the begin
        token is one. documents: numbers that decide the noise of each row; default: 0, 1, ...
        The numbers are those of `refusion evaluate` (see likelihood.py); they do not depend on neighbours.
        Raises ValueError if a model of slots does not say of which sizes.
        """
        trained = _trained(self.config)  # type: ignore[attr-defined]
        weights = trained.get("slot_weights")
        masking = Masking(
            trained["objective"], trained["mask_token_id"], tuple(trained.get("slot_sizes") or ()),
            None if weights is None else tuple(weights), trained.get("eps", 1e-3),
        )  # fmt: skip
        if masking.objective == "slots" and not masking.slot_sizes:
            raise ValueError("likelihood needs the slot sizes: config.refusion['slot_sizes'] is missing")
        rows = _prompts(input_ids, attention_mask)
        given = [prompt_length] * len(rows) if isinstance(prompt_length, int) else prompt_length
        numbers = list(range(len(rows))) if documents is None else documents
        if len(given) != len(rows) or len(numbers) != len(rows):
            raise ValueError(f"prompt_length and documents need one number for each of the {len(rows)} rows")
        return [likelihood(self, *row) for row in zip(rows, given, [masking] * len(rows), numbers, strict=True)]


class ReFusionQwen3ForCausalLM(SlotGeneration, Qwen3ForCausalLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Qwen3 (with q/k norm) that decodes slots."""


class ReFusionQwen2ForCausalLM(SlotGeneration, Qwen2ForCausalLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Qwen2 (with biases on query, key and value) that decodes slots."""


class ReFusionLlamaForCausalLM(SlotGeneration, LlamaForCausalLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Llama (without q/k norm) that decodes slots."""


# pipeline("text-generation") warns of every class whose name is not here. These keys are no model types, so no folder
# is loaded differently for them.
for _class in (ReFusionQwen3ForCausalLM, ReFusionQwen2ForCausalLM, ReFusionLlamaForCausalLM):
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"refusion-{_class.__name__}"] = _class.__name__


# ---------------------------------------------------------------------------------------------------------- options


def _trained(config: Any) -> dict[str, Any]:
    """How the model was trained, from its configuration; without a word there, as an ordinary language model."""
    return {"objective": "ar", "mask_token_id": -1, **(getattr(config, "refusion", None) or {})}


def _resolve(
    config: Any, defaults: GenerationConfig, padded: int, longest: int, given: dict[str, Any]
) -> tuple[Settings, int]:
    """Settings and the padding id from what is given, the generation configuration and the training.

    padded, longest: length of the prompts with their padding, and of the longest one without.
    """
    given, trained = dict(given), _trained(config)
    values = {name: getattr(defaults, name) for name in _OPTIONS if getattr(defaults, name, None) is not None}
    for name in ("temperature", "top_p"):  # of transformers: they count only where sampling is asked for
        values.pop(name, None)
    values.setdefault("decoding", DECODINGS_OF[trained["objective"]][0])
    end = given.pop("eos_token_id", getattr(defaults, "eos_token_id", None))
    pad = given.pop("pad_token_id", getattr(defaults, "pad_token_id", None))
    ends = tuple(end) if isinstance(end, (list, tuple)) else () if end is None else (int(end),)
    _lengths(given, padded)
    _sampling(given, defaults)
    for name in list(given):
        if name in _NEUTRAL and given[name] in _NEUTRAL[name]:
            del given[name]
    for name, value in given.items():
        if name not in _OPTIONS:
            raise ValueError(_unknown(name, value))
        if value is not None:
            values[name] = value
    if not trained.get("cross_slot_targets", False):
        if given.get("first_from_ar"):
            raise ValueError("first_from_ar=True needs a model trained with objective.cross_slot_targets=true")
        values["first_from_ar"] = False
    settings = Settings(mask_id=trained["mask_token_id"], end_ids=ends, **values)
    _fit_positions(config, longest, settings, given.get("max_new_tokens") is not None)
    settings.validate()
    if settings.decoding not in DECODINGS_OF[trained["objective"]]:
        raise ValueError(
            f"decoding={settings.decoding} does not suit a model trained with objective.name={trained['objective']}; "
            f"use {' or '.join(DECODINGS_OF[trained['objective']])}"
        )
    for name in ("steps", "confidence_threshold"):
        if given.get(name) is not None and settings.decoding != "mdm":
            raise ValueError(f"decoding={settings.decoding} has no use of {name}={given[name]}, which is of mdm only")
    if settings.decoding != "left_to_right" and settings.mask_id < 0:
        raise ValueError(
            f"decoding={settings.decoding} needs a mask token: config.refusion['mask_token_id'] is missing"
        )
    if getattr(config, "use_sliding_window", False):
        raise ValueError("sliding-window attention is not supported; set use_sliding_window=false in config.json")
    return settings, pad if pad is not None else ends[0] if ends else 0


def _lengths(given: dict[str, Any], prompt: int) -> None:
    """Turn max_length (prompt included) into max_new_tokens, unless that is given too."""
    length = given.pop("max_length", None)
    if length is not None and given.get("max_new_tokens") is None:
        if length <= prompt:
            raise ValueError(f"max_length={length} leaves no room behind a prompt of {prompt} tokens")
        given["max_new_tokens"] = length - prompt


def _sampling(given: dict[str, Any], defaults: GenerationConfig) -> None:
    """do_sample as in transformers: True samples at temperature 1 unless given, False is greedy whatever is given."""
    sample = given.pop("do_sample", None)
    if sample is None and given.get("temperature") is None:
        sample = bool(getattr(defaults, "do_sample", False))
    if sample is False:
        given["temperature"] = 0.0
    elif sample:
        for name in ("temperature", "top_p"):
            if given.get(name) is None:
                value = getattr(defaults, name, None)
                given[name] = 1.0 if value is None else value


def _unknown(name: str, value: Any) -> str:
    if name in _NEUTRAL:
        return f"generate: {name}={value!r} is not supported by this decoder; leave it out"
    near = difflib.get_close_matches(name, _OPTIONS, n=1)
    return f"generate: unknown option '{name}'; " + (f"did you mean '{near[0]}'?" if near else f"known: {_OPTIONS}")


# ------------------------------------------------------------------------------------------------- rows and results


def _fit_positions(config: Any, prompt: int, settings: Settings, asked: bool) -> None:
    """Shorten a response whose length nobody asked for to the positions that the model has; refuse any other."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or not isinstance(settings.max_new_tokens, int) or not isinstance(settings.slot_size, int):
        return  # the latter: `validate` says so
    if settings.slot_size < 1 or prompt + settings.region <= limit:
        return
    blocks = settings.num_blocks if settings.decoding != "left_to_right" else 1
    unit = settings.unit * max(1, blocks) if isinstance(blocks, int) else settings.unit
    if asked or limit - prompt < unit:
        raise ValueError(
            f"a prompt of {prompt} tokens and max_new_tokens={settings.max_new_tokens} (in whole slots "
            f"{settings.region}) do not fit the {limit} positions of the model; shorten one of them"
        )
    settings.max_new_tokens = (limit - prompt) // unit * unit


def _prompts(ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Token ids of each row without its padding."""
    if attention_mask is None:
        return ids.tolist()
    if attention_mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(ids.shape)} differ in shape"
        )
    return [row[kept].tolist() for row, kept in zip(ids, attention_mask.bool(), strict=True)]


def _both_ways(shaped: Tensor, attention_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [batch, 1, tokens, tokens] in which every token sees every one that is not padding."""
    batch, length = shaped.shape[:2]
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    seen = torch.ones(batch, length, device=shaped.device) if attention_mask is None else attention_mask
    hidden = torch.zeros(batch, 1, length, length, dtype=dtype, device=shaped.device)
    return hidden.masked_fill(seen.to(shaped.device)[:, None, None, :] == 0, torch.finfo(dtype).min)


class _Watcher:
    """Passes updates on, and feeds a streamer with the tokens that stand without a gap behind the prompt."""

    def __init__(self, streamer: Any, on_update: Callable[[Update], None] | None) -> None:
        self.streamer = streamer
        self.on_update = on_update
        self.shown = 0

    def __call__(self, update: Update) -> None:
        if self.on_update is not None:
            self.on_update(update)
        if self.streamer is not None:
            stop = len(update.tokens) if update.end is None else min(update.end + 1, len(update.tokens))
            while self.shown < stop and update.decided[self.shown]:
                self.streamer.put(torch.tensor([update.tokens[self.shown]]))
                self.shown += 1


def _criteria(given: Any, stop_strings: str | list[str] | None, tokenizer: Any) -> StoppingCriteriaList | None:
    """All criteria to stop as one; None if there are none."""
    criteria = StoppingCriteriaList(given or [])
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: generate(..., tokenizer=tokenizer)")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    return criteria if len(criteria) else None


def _cut(decoded: list[Decoded], ids: Tensor, criteria: StoppingCriteriaList, pad_id: int) -> None:
    """Shorten the responses as if they had been made token by token and the criteria asked after each."""
    longest = max(len(one.tokens) for one in decoded)
    padded = [one.tokens + [pad_id] * (longest - len(one.tokens)) for one in decoded]
    whole = torch.cat([ids, torch.tensor(padded, dtype=ids.dtype, device=ids.device)], dim=1)
    going = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for length in range(1, longest + 1):
        stops = torch.as_tensor(criteria(whole[:, : ids.shape[1] + length], None), device=ids.device)  # type: ignore[arg-type]
        for row in (going & stops).nonzero()[:, 0].tolist():
            decoded[row].tokens = decoded[row].tokens[:length]
        going &= ~stops
        if not going.any():
            return


def _watcher(streamer: Any, on_update: Callable[[Update], None] | None) -> _Watcher | None:
    return _Watcher(streamer, on_update) if streamer is not None or on_update is not None else None


def _finish_stream(streamer: Any, watch: _Watcher | None, decoded: Decoded) -> None:
    assert watch is not None and watch.shown == len(decoded.tokens), "the streamer was not given every token"
    streamer.end()


def _stats(decoded: list[Decoded], seconds: float) -> dict[str, Any]:
    forwards = sum(one.forwards for one in decoded)
    tokens = sum(len(one.tokens) for one in decoded)
    return {
        "rows": len(decoded),
        "forwards": forwards,
        "query_tokens": sum(one.query_tokens for one in decoded),
        "new_tokens": tokens,
        "tokens_per_forward": tokens / max(1, forwards),
        "seconds": seconds,
    }


def _output(sequences: Tensor, decoded: list[Decoded]) -> ReFusionOutput:
    forwards = torch.tensor([one.forwards for one in decoded])
    tokens = torch.tensor([len(one.tokens) for one in decoded])
    return ReFusionOutput(
        sequences=sequences,
        forwards=forwards,
        query_tokens=torch.tensor([one.query_tokens for one in decoded]),
        new_tokens=tokens,
        tokens_per_forward=tokens.double() / forwards.clamp(min=1),
    )
