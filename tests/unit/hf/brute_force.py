"""A second decoder for comparison: no cache, every forward recomputed from nothing in float64, dense masks by hand.

It shares no code with refusion_train.hf. What a token saw when its keys were made is kept as a set of places, so
a forward over the whole physical sequence with the mask of those sets is what a cache must reproduce.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Qwen3Config

VOCAB, MASK = 24, 4


def tiny_model(seed: int, objective: str = "slots", sharpness: float = 1.0, family: str = "qwen3", **refusion: object):
    """A random model in float64 whose predictions differ widely in sureness."""
    from transformers import LlamaConfig

    from refusion_train.hf.modeling_refusion import ReFusionLlamaForCausalLM, ReFusionQwen3ForCausalLM

    config_class = Qwen3Config if family == "qwen3" else LlamaConfig
    config = config_class(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
        attn_implementation="sdpa",
        refusion={"objective": objective, "mask_token_id": MASK, "cross_slot_targets": True, **refusion},
    )  # fmt: skip
    model_class = ReFusionQwen3ForCausalLM if family == "qwen3" else ReFusionLlamaForCausalLM
    torch.manual_seed(seed)
    model = model_class(config).double().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=sharpness * (1.0 if "lm_head" in name or "embed" in name else 0.35))
    return model


def dense_logits(model: torch.nn.Module, tokens: list[int], positions: list[int], seen: Tensor) -> Tensor:
    """Logits [n, vocab] in float64 of n tokens, where seen [n, n] says which token sees which; written out by hand."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    config = model.config
    size, heads, kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    frequency = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    angles = torch.tensor(positions).double()[:, None] * frequency
    cos, sin = torch.cos(angles), torch.sin(angles)

    def norm(states: Tensor, name: str) -> Tensor:
        scale = (states.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return states * scale * weights[name]

    def turn(states: Tensor) -> Tensor:  # [n, heads, size]
        a, b = states[..., : size // 2], states[..., size // 2 :]
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1)

    hidden = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    count = len(tokens)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        x = norm(hidden, at + "input_layernorm.weight")
        q, k, v = (x @ weights[f"{at}self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = q.view(count, heads, size), k.view(count, kv, size), v.view(count, kv, size)
        if at + "self_attn.q_norm.weight" in weights:
            q, k = norm(q, at + "self_attn.q_norm.weight"), norm(k, at + "self_attn.k_norm.weight")
        q, k = turn(q), turn(k)
        k, v = k.repeat_interleave(heads // kv, dim=1), v.repeat_interleave(heads // kv, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / size**0.5
        scores = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", scores, v).reshape(count, heads * size)
        hidden = hidden + mixed @ weights[at + "self_attn.o_proj.weight"].T
        x = norm(hidden, at + "post_attention_layernorm.weight")
        gate, up = (x @ weights[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(hidden, "model.norm.weight") @ weights["lm_head.weight"].T


@dataclass
class BruteForce:
    """Plan, verify, infill, written down as plainly as possible. `events` counts what happened."""

    model: torch.nn.Module
    prompt: list[int]
    region: int
    slot_size: int
    num_blocks: int = 1
    slot_threshold: float = 0.9
    token_threshold: float = 0.4
    correction: str = "ar"
    exact_kv: bool = False
    first_from_ar: bool = True
    ends: tuple[int, ...] = ()
    forwards: int = 0
    events: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.physical: list[tuple[int, int, set[int]]] = []  # token, position, places seen (its own included)
        self.answer: dict[int, int] = {}  # position -> token
        self.ahead: dict[int, tuple[int, float]] = {}  # position -> left-to-right prediction of its token

    def look(self, *groups: list[tuple[int, int]]) -> list[list[Tensor]]:
        """One forward: probabilities [vocab] behind each (token, position) of each group, which see themselves only."""
        self.forwards += 1
        sequence = list(self.physical)
        for group in groups:
            first = len(sequence)
            for token, position in group:
                place = len(sequence)
                sequence.append((token, position, set(range(len(self.physical))) | set(range(first, place + 1))))
        seen = torch.zeros(len(sequence), len(sequence), dtype=torch.bool)
        for place, (_, _, places) in enumerate(sequence):
            seen[place, list(places)] = True
        logits = dense_logits(self.model, [s[0] for s in sequence], [s[1] for s in sequence], seen)
        logits[:, MASK] = -torch.inf
        rows = list(logits.softmax(-1)[len(self.physical) :])
        return [[rows.pop(0) for _ in group] for group in groups]

    def keep(self, group: list[tuple[int, int]], base: int, offset: int = 0) -> None:
        """Commit a group that saw the first `base` places and itself (and, before it, `offset` tokens of its pass)."""
        first = len(self.physical)
        for index, (token, position) in enumerate(group):
            own = set(range(first - offset, first + index + 1))
            self.physical.append((token, position, set(range(base)) | own))

    def slot_positions(self, slot: int) -> list[int]:
        first = len(self.prompt) + slot * self.slot_size
        return list(range(first, first + self.slot_size))

    def end(self) -> int | None:
        found = [position for position, token in self.answer.items() if token in self.ends]
        return min(found) if found else None

    def alive(self, slots: list[int]) -> list[int]:
        end = self.end()
        return [slot for slot in slots if end is None or self.slot_positions(slot)[0] <= end]

    def cut(self, tokens: list[int], accepted: int) -> tuple[list[int], int]:
        """End a slot at an end token among its accepted ones."""
        for index in range(accepted):
            if tokens[index] in self.ends:
                self.events["cut in a slot"] += index + 1 < len(tokens)
                return tokens[: index + 1], index + 1
        return tokens, accepted

    def verify(self, tokens: list[int], accepted: int, rows: list[Tensor]) -> tuple[list[int], int]:
        while accepted < len(tokens) and rows[accepted - 1][tokens[accepted]] > self.token_threshold:
            accepted += 1
        return self.cut(tokens, accepted)

    def run(self) -> list[int]:
        """The response up to its earliest end token."""
        if self.prompt:
            rows = self.look([(token, i) for i, token in enumerate(self.prompt)])[0]
            self.keep([(token, i) for i, token in enumerate(self.prompt)], 0)
            self.forwards -= 1  # of the first plan: masks behind the prompt change nothing in it
            self.remember(len(self.prompt), rows[-1])
        slots = list(range(self.region // self.slot_size))
        per_block = len(slots) // self.num_blocks
        for block in range(self.num_blocks):
            pool = self.alive(slots[block * per_block : (block + 1) * per_block])
            while pool:
                done = self.iterate(pool)
                after = [slot for slot in pool if slot not in done]
                pool = self.alive(after)
                self.events["slot dropped behind an end"] += len(after) > len(pool)
                if self.end() is not None and pool:
                    self.events["slot before an end still to do"] += 1
        end = self.end()
        last = len(self.prompt) + self.region if end is None else end + 1
        return [self.answer[position] for position in range(len(self.prompt), last)]

    def remember(self, position: int, probabilities: Tensor) -> None:
        self.ahead[position] = (int(probabilities.argmax()), float(probabilities.max()))

    def iterate(self, pool: list[int]) -> list[int]:
        """Plan, then verify, then infill if need be; returns the slots that are committed."""
        places = [(MASK, position) for slot in pool for position in self.slot_positions(slot)]
        rows = self.look(places)[0]
        drafts, sureness = {}, {}
        for index, slot in enumerate(pool):
            mine = rows[index * self.slot_size : (index + 1) * self.slot_size]
            drafts[slot] = [int(row.argmax()) for row in mine]
            sureness[slot] = float(mine[0].max())
            token, probability = self.ahead.get(self.slot_positions(slot)[0], (0, 0.0))
            if self.first_from_ar and probability > sureness[slot]:
                self.events["first token from the left"] += drafts[slot][0] != token
                drafts[slot][0], sureness[slot] = token, probability
        chosen = [slot for slot in pool if sureness[slot] > self.slot_threshold]
        if not chosen:
            chosen = [slot for slot in pool if sureness[slot] >= max(sureness.values()) - 1e-6][:1]
            self.events["best slot only"] += 1
        firsts = [slot for slot in chosen if drafts[slot][0] in self.ends]
        if firsts:
            chosen = [slot for slot in chosen if slot <= firsts[0]]
            drafts[firsts[0]] = drafts[firsts[0]][:1]

        def with_positions(slot: int, tokens: list[int]) -> list[tuple[int, int]]:
            return list(zip(tokens, self.slot_positions(slot), strict=False))

        rows = self.look([pair for slot in chosen for pair in with_positions(slot, drafts[slot])])[0]
        outcome: dict[int, list[int]] = {}
        accepted, behind = {}, {}
        for slot in chosen:
            behind[slot], rows = rows[: len(drafts[slot])], rows[len(drafts[slot]) :]
            outcome[slot], accepted[slot] = self.verify(drafts[slot], 1, behind[slot])
        run = []
        for slot in chosen:
            if accepted[slot] < len(outcome[slot]):
                break
            run.append(slot)
            if outcome[slot][-1] in self.ends:
                break
        self.events["leading run"] += bool(run)
        self.events["run of several"] += len(run) > 1
        base = len(self.physical)
        if run:
            for slot in run:
                self.keep(with_positions(slot, outcome[slot]), base, len(self.physical) - base)
                self.answer.update({position: token for token, position in with_positions(slot, outcome[slot])})
                self.remember(self.slot_positions(slot)[0] + self.slot_size, behind[slot][len(outcome[slot]) - 1])
            return run
        return self.infill(chosen, outcome, accepted, behind)

    def infill(
        self, chosen: list[int], tokens: dict[int, list[int]], accepted: dict[int, int], behind: dict[int, list[Tensor]]
    ) -> list[int]:
        self.events["infill"] += 1
        self.events["infill of several"] += len(chosen) > 1
        base = len(self.physical)
        last: dict[int, Tensor] = {}
        finished: list[int] = []

        def settle(slots: list[int]) -> list[int]:
            """Enter the accepted tokens; returns the slots that do not begin behind an end."""
            for slot in slots:
                for index in range(accepted[slot]):
                    self.answer[self.slot_positions(slot)[index]] = tokens[slot][index]
            kept = self.alive(slots)
            self.events["slot dropped in infill"] += len(kept) < len(slots)
            return kept

        while True:
            chosen = settle(chosen)
            rejected = [slot for slot in chosen if accepted[slot] < len(tokens[slot])]
            if self.correction == "redraft" and rejected:
                groups = []
                for slot in rejected:
                    row = tokens[slot][: accepted[slot]] + [MASK] * (self.slot_size - accepted[slot])
                    groups.append(list(zip(row, self.slot_positions(slot), strict=True)))
                for slot, rows in zip(rejected, self.look(*groups), strict=True):
                    fresh = [int(row.argmax()) for row in rows[accepted[slot] :]]
                    tokens[slot] = tokens[slot][: accepted[slot]] + fresh
            elif self.correction == "ar":
                for slot in rejected:
                    for index in range(accepted[slot], len(tokens[slot])):
                        tokens[slot][index] = int(behind[slot][index - 1].argmax())
            for slot in rejected:
                tokens[slot], accepted[slot] = self.cut(tokens[slot], accepted[slot] + 1)
            chosen = settle(chosen)
            todo = [slot for slot in chosen if slot not in finished]
            if not todo:
                break
            groups = [list(zip(tokens[slot], self.slot_positions(slot), strict=False)) for slot in todo]
            for slot, rows in zip(todo, self.look(*groups), strict=True):
                tokens[slot], accepted[slot] = self.verify(tokens[slot], accepted[slot], rows)
                behind[slot] = rows
                if accepted[slot] == len(tokens[slot]):
                    finished.append(slot)
                    last[slot] = rows[len(tokens[slot]) - 1]
        pairs = {slot: list(zip(tokens[slot], self.slot_positions(slot), strict=False)) for slot in chosen}
        if self.exact_kv and len(chosen) > 1:
            rows = self.look([pair for slot in chosen for pair in pairs[slot]])[0]
            for slot in chosen:
                last[slot] = rows[len(pairs[slot]) - 1]
                rows = rows[len(pairs[slot]) :]
        for slot in chosen:
            self.keep(pairs[slot], base, len(self.physical) - base if self.exact_kv else 0)
            self.remember(self.slot_positions(slot)[0] + self.slot_size, last[slot])
        return chosen
