"""The objectives once more, one document and one token at a time in plain Python, to compare the fast ones with.

Nothing is shared with the package: hashes are Python integers, rows are lists. It follows docs/objective.md sentence by
sentence and is as slow as it looks.
"""

from __future__ import annotations

import numpy as np

MASK64 = (1 << 64) - 1
SIZE, TIME, MASK, ORDER, PARTIAL, PREFIX, TOKEN, PLAIN = range(8)


def mix(key: int, what: int, index: int = 0) -> int:
    z = (key + (index * 8 + what + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def uniform(value: int) -> float:
    return (value >> 11) / 2**53


def slot_weights(config, step):
    """The weights at a step: interpolated by numpy, one slot size at a time."""
    given = config.slot_weights or [1.0] * len(config.slot_sizes)
    if not isinstance(given[0], list):
        return given
    return [float(np.interp(step, [s for s, _ in given], [w[i] for _, w in given])) for i in range(len(given[0][1]))]


class Document:
    """One document after corruption: lists in physical order."""

    def __init__(self, tokens, prompt, key, config, mask_id, t, step):
        self.ids, self.positions, self.labels, self.kinds, self.weights, self.buckets = [], [], [], [], [], []
        self.tokens, self.prompt, self.key, self.config, self.mask_id = tokens, prompt, key, config, mask_id
        self.response, self.step = len(tokens) - prompt, step
        self.plain = uniform(mix(key, PLAIN)) < config.ar_probability
        drawn = uniform(mix(key, TIME)) if t is None else t
        self.p = (1 - config.eps) * drawn + config.eps
        getattr(self, "ar" if self.plain else config.name)()

    def put(self, position, target=None, masked=False):
        """Append the token of a position; target: the position of the token that it predicts."""
        self.ids.append(self.mask_id if masked else self.tokens[position])
        self.positions.append(position)
        self.labels.append(-100 if target is None else self.tokens[target])
        self.kinds.append(0 if target is None else 2 if masked else 1)
        scale = self.p if self.config.normalization == "token" else self.p * self.response
        self.weights.append(np.float32(0 if target is None else 1 / scale if masked else 1))
        self.buckets.append(min(9, int(10 * self.p)) if masked else 0)

    def ar(self):
        for i in range(len(self.tokens)):
            has_target = i + 1 < len(self.tokens) and i + 1 >= self.prompt
            self.put(i, i + 1 if has_target else None)

    def mdm(self):
        for i in range(len(self.tokens)):
            masked = i >= self.prompt and uniform(mix(self.key, TOKEN, i - self.prompt)) < self.p
            self.put(i, i if masked else None, masked)

    def slots(self):
        config, end = self.config, len(self.tokens)
        weights = slot_weights(config, self.step)
        u, size, total = uniform(mix(self.key, SIZE)), None, 0.0
        for candidate, weight in zip(config.slot_sizes, weights, strict=True):
            total += weight
            if size is None and u < total / sum(weights):
                size = candidate
        cut = [(i, range(at, min(at + size, end))) for i, at in enumerate(range(self.prompt, end, size))]
        masked, clean = [], []
        for slot in cut:
            (masked if uniform(mix(self.key, MASK, slot[0])) < self.p else clean).append(slot)
        clean.sort(key=lambda slot: (mix(self.key, ORDER, slot[0]) >> 24, slot[0]))
        for i in range(self.prompt):
            last = config.cross_slot_targets and i == self.prompt - 1 and self.response > 0
            self.put(i, i + 1 if last else None)
        for _, slot in clean:
            for i in slot:
                inside = i + 1 in slot
                self.put(i, i + 1 if inside or (config.cross_slot_targets and i + 1 < end) else None)
        for number, slot in masked:
            head = 0
            if len(slot) > 1 and uniform(mix(self.key, PARTIAL, number)) < config.partial_slot_probability:
                head = 1 + ((mix(self.key, PREFIX, number) >> 32) * (len(slot) - 1) >> 32)
            for i in slot[:head]:
                self.put(i, i + 1)
            for i in slot[head:]:
                self.put(i, i, masked=True)


def corrupt(packed, config, mask_id, t=None, step=0):
    """All fields of a Batch, by name, as arrays."""
    rows, width = packed.tokens.shape
    flat = packed.tokens.reshape(-1).tolist()
    ids, positions, documents = list(flat), [0] * len(flat), [-1] * len(flat)
    labels, kinds, weights, buckets = [-100] * len(flat), [0] * len(flat), [0.0] * len(flat), [0] * len(flat)
    counts = np.zeros((rows, 3))
    numbers = [0] * rows
    for i, (start, length, prompt, key) in enumerate(
        zip(*(a.tolist() for a in (packed.starts, packed.lengths, packed.prompts, packed.keys)), strict=True)
    ):
        if not length:
            continue
        document = Document(
            flat[start : start + length], prompt, key, config, mask_id, None if t is None else float(t[i]), step
        )
        row = start // width
        here = slice(start, start + length)
        ids[here], positions[here], labels[here] = document.ids, document.positions, document.labels
        kinds[here], weights[here], buckets[here] = document.kinds, document.weights, document.buckets
        documents[here] = [numbers[row]] * length
        numbers[row] += 1
        masked = 0 if document.plain else document.response
        counts[row] += [document.kinds.count(1), masked, masked > 0]
    shape = (rows, width)
    return {
        "input_ids": np.array(ids, np.int64).reshape(shape),
        "position_ids": np.array(positions, np.int64).reshape(shape),
        "document_ids": np.array(documents, np.int32).reshape(shape),
        "labels": np.array(labels, np.int64).reshape(shape),
        "loss_weight": np.array(weights, np.float32).reshape(shape),
        "target_kind": np.array(kinds, np.uint8).reshape(shape),
        "noise_bucket": np.array(buckets, np.uint8).reshape(shape),
        "counts": counts,
    }


def pack(documents, rows, width, seed=0, piece=0):
    """PackedDocuments from (row, offset in the row, length, prompt, document id), in order; tokens by document id.

    Padding is 0; the token of position i of a document is a function of the document's id and i.
    """
    from refusion_train.objective import PackedDocuments, document_key

    tokens = np.zeros((rows, width), np.int32)
    for row, offset, length, _, number in documents:
        tokens[row, offset : offset + length] = 10 + (number * 1009 + np.arange(length) * 7) % 1000
    columns = np.array(documents, np.int64).reshape(-1, 5).T
    return PackedDocuments(
        tokens=tokens,
        starts=columns[0] * width + columns[1],
        lengths=columns[2].copy(),
        prompts=columns[3].copy(),
        keys=np.atleast_1d(document_key(seed, 0, columns[4], piece)),
    )
