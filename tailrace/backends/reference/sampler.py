"""From logits to tokens: the rules of sampling, spelled out. The native sampler must agree with this one.

Order: the mask; repetition, presence and frequency penalties; bias; temperature; min-p, top-k, top-p; then the token
with the largest (logit - best logit) / temperature + Gumbel noise (Gumbel-max: Maddison et al. 2014). The noise depends
on (seed, position, token) alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailrace.backends import Masks, Result, Sampling

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_MASK = 0xFFFFFFFF


def gumbel(seed: int, position: int, vocab: int) -> Floats:
    """Standard Gumbel noise of every token: [vocab]. Counter-based: a hash of (seed, position, token) gives 23 bits."""
    low, high = seed & _MASK, seed >> 32 & _MASK
    a = np.uint32(low ^ (position * 0x9E3779B9 & _MASK))
    b = np.uint32(high + position * 0x85EBCA6B & _MASK)
    h = np.arange(vocab, dtype=np.uint32) * np.uint32(0xCC9E2D51) + a
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h += b
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    h ^= a
    h *= np.uint32(0x9E3779B1)
    h ^= h >> np.uint32(15)
    # 23 bits, so that the half is exact: with 24 the largest would round to 1, whose noise is infinite
    uniform = ((h >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def sample(logits: Floats, sampling: Sampling, *, vocab_limit: int | None = None) -> Result:
    """One token for each row of logits [wanted, vocab], with log-probabilities of the raw logits. Ids from
    `vocab_limit` on are padding of the head: never drawn, and in nobody's sum. The token is -1 where there is none to
    choose: all are banned, or a logit is no number."""
    rows = len(logits)
    logits = logits[:, :vocab_limit]
    if sampling.masks is not None and not sampling.masks.ready[0]:
        raise ValueError("the masks were not released")
    tokens = np.zeros(rows, np.int32)
    logprobs = np.zeros(rows, np.float32)
    width = max(0, int(sampling.logprobs.max(initial=0)))
    top_tokens = np.zeros((rows, width), np.int32)
    top_logprobs = np.zeros((rows, width), np.float32)
    for row in range(rows):
        forced = int(sampling.forced[row])
        tokens[row] = (
            forced
            if forced >= 0
            else _draw(_adjusted(masked(logits[row], sampling.masks, row), sampling, row), sampling, row)
        )
        if sampling.logprobs[row] < 0 and forced < 0:
            continue
        scores = log_softmax(logits[row])
        logprobs[row] = scores[tokens[row]] if tokens[row] >= 0 else 0.0
        best = np.argsort(-scores, kind="stable")[: max(0, int(sampling.logprobs[row]))]
        top_tokens[row, : len(best)], top_logprobs[row, : len(best)] = best, scores[best]
    return Result(tokens, logprobs, top_tokens, top_logprobs)


def masked(logits: Floats, masks: Masks | None, row: int) -> Floats:
    """The row's logits, minus infinity where its mask leaves a token out."""
    line = -1 if masks is None else int(masks.row[row])
    if masks is None or line < 0:
        return logits
    allowed = np.unpackbits(masks.bits[line].view(np.uint8), count=len(logits), bitorder="little").astype(bool)
    return np.where(allowed, logits, np.float32(-np.inf)).astype(np.float32)


def log_softmax(logits: Floats) -> Floats:
    """Natural-log probabilities, summed in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    scores: Floats = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return scores


def _adjusted(logits: Floats, sampling: Sampling, row: int) -> Floats:
    """The row's logits after penalties and bias."""
    adjusted = logits.copy()
    begin, end = sampling.seen_start[row], sampling.seen_start[row + 1]
    seen, count = sampling.seen_token[begin:end], sampling.seen_count[begin:end].astype(np.float32)
    known = seen < len(adjusted)  # a prompt may hold ids of the head's padding
    seen, count = seen[known], count[known]
    repetition = sampling.repetition[row]
    at = adjusted[seen]
    at = np.where(at > 0, at / repetition, at * repetition)
    at -= sampling.presence[row] * (count > 0) + sampling.frequency[row] * count
    adjusted[seen] = at
    begin, end = sampling.bias_start[row], sampling.bias_start[row + 1]
    biased, value = sampling.bias_token[begin:end], sampling.bias_value[begin:end]
    known = biased < len(adjusted)
    adjusted[biased[known]] += value[known]
    return adjusted


def _draw(logits: Floats, sampling: Sampling, row: int) -> int:
    temperature = sampling.temperature[row]
    best = logits.max()
    if not best > -np.inf:
        return -1
    if temperature == 0:
        return int(np.argmax(logits))
    if not best < np.inf:
        return -1
    with np.errstate(over="ignore"):  # a tiny temperature: the rest is then rightly minus infinity
        scaled = (logits - best) / temperature
    kept = _kept(scaled, int(sampling.top_k[row]), float(sampling.top_p[row]), float(sampling.min_p[row]))
    noise = gumbel(int(sampling.seed[row]), int(sampling.position[row]), len(logits))
    noisy = np.full(len(logits), -np.inf, np.float32)
    noisy[kept] = (scaled + noise)[kept]
    return int(np.argmax(noisy))


def _kept(scaled: Floats, top_k: int, top_p: float, min_p: float) -> Ids:
    """Ids that the filters keep, likeliest first, ties by id. The best of `scaled` is 0."""
    order: Ids = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order].astype(np.float64))  # the likeliest has 1
    keep = weights > 0
    if min_p > 0:
        keep &= weights >= min_p
    kept: Ids = order[keep]
    weights = weights[keep]
    if top_k > 0:
        kept, weights = kept[:top_k], weights[:top_k]
    if top_p < 1:
        before = np.cumsum(weights) - weights  # a token stays when what comes before it has not reached top_p
        kept = kept[: max(1, int((before < top_p * weights.sum()).sum()))]
    return kept
