"""How a token is drawn from logits, and the noise that decides it.

A draw is `argmax(truncate(logits / temperature) + gumbel)`, which has exactly the law
`softmax(truncate(logits / temperature))`. The noise is a pure function of (request seed, absolute
position, vocabulary id), so a request draws the same token whatever it is batched with, whatever
tree it is drafted with, and however the vocabulary is spread over devices.

Everything that may differ between requests is an array with one value a row: no value compiles
anything. The order of operations is vLLM's: bias and forbidden ids, temperature, min-p, top-k,
top-p.

Where a function takes `vocab`, its logits may be one device's part of a vocabulary that a group of
devices shares. They exchange maxima, counts and sums, never logits, and all get the same result.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.sharding.group import ALONE, Group

MAX_LOGPROBS = 20  # of the most likely tokens at each position; the OpenAI API's limit
MAX_BIAS = 100.0  # the OpenAI API's limit; with it a token is as good as banned or forced
# Below it logits / temperature has too few digits left to tell close logits apart.
MIN_TEMPERATURE = 1e-3


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is continued. Names are vLLM's; a value out of range raises ValueError.

    Attributes:
        temperature: 0 is greedy (the most likely token, the lowest id among equals).
        top_p: keep the smallest set of most likely tokens whose probability reaches it; 1 is off.
        top_k: keep this many most likely tokens, and those equal to the last of them; 0 is off.
        min_p: keep tokens at least this likely, relative to the most likely one; 0 is off.
        seed: 0 .. 2**64 - 1; the same seed gives the same text. None: the engine chooses.
        max_tokens: most tokens to generate; None: as many as the context holds.
        min_tokens: no stop id is drawn before this many tokens.
        stop: string or strings that end the text; kept as a tuple.
        stop_token_ids: ids that end the text, besides the model's own.
        ignore_eos: the model's own stop ids do not end the text.
        logprobs: None, or how many of the most likely tokens to report at each position; the
            drawn token's log-probability is reported with any number, 0 included.
        logit_bias: vocabulary id -> number added to its logit, -100 .. 100.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        temperature = self.temperature
        _require(
            _is_number(temperature) and (temperature == 0 or temperature >= MIN_TEMPERATURE),
            "temperature",
            temperature,
            f"0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(
            _is_count(self.top_k) and self.top_k < 2**31,
            "top_k",
            self.top_k,
            "an integer >= 0 (0 turns it off) and below 2**31",
        )
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(
            self.seed is None or (_is_count(self.seed) and self.seed < 2**64),
            "seed",
            self.seed,
            "None or an integer in [0, 2**64)",
        )
        _require(
            self.max_tokens is None or (_is_count(self.max_tokens) and self.max_tokens > 0),
            "max_tokens",
            self.max_tokens,
            "None or an integer >= 1",
        )
        limit = math.inf if self.max_tokens is None else self.max_tokens
        _require(
            _is_count(self.min_tokens) and self.min_tokens <= limit,
            "min_tokens",
            self.min_tokens,
            f"an integer in [0, max_tokens = {limit}]",
        )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(
            isinstance(stop, tuple | list) and all(isinstance(s, str) and s for s in stop),
            "stop",
            self.stop,
            "a non-empty string or a tuple of them",
        )
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        _require(
            isinstance(ids, tuple | list) and all(_is_count(id) for id in ids),
            "stop_token_ids",
            ids,
            "a tuple of token ids",
        )
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _require(
            self.logprobs is None or (_is_count(self.logprobs) and self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            self.logprobs,
            f"None or an integer in [0, {MAX_LOGPROBS}]",
        )
        bias = self.logit_bias
        _require(isinstance(bias, Mapping), "logit_bias", bias, "a dict of token id -> number")
        for id, value in bias.items():
            _require(_is_count(id), "logit_bias", id, "keyed by token ids")
            _require(
                _is_number(value) and abs(value) <= MAX_BIAS,
                f"logit_bias[{id}]",
                value,
                f"in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
            )
        object.__setattr__(self, "logit_bias", dict(bias))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError, naming the id, if a stop id or bias id is not below `vocab_size`."""
        for name in ("stop_token_ids", "logit_bias"):
            for id in getattr(self, name):
                _require(id < vocab_size, name, id, f"ids below the vocabulary size {vocab_size}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")


GREEDY = SamplingParams(temperature=0.0)
THINKING = SamplingParams(temperature=1.0, top_p=0.95)  # K2.6's model card, thinking mode
INSTANT = SamplingParams(temperature=0.6, top_p=0.95)  # K2.6's model card, instant mode
TINY = SamplingParams(temperature=0.7, top_p=0.95)  # the bundled tiny-k2


# Noise

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds: two words of key and of counter -> two random words.

    All are uint32 and broadcast against each other. Written out here, rather than taken from
    `jax.random`, because seeds must give the same text in every release.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))
            y = y ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise from uniform uint32 words: float32, always finite, in [-2.9, 22.9].

    The large values decide draws. They come from small uniforms, where float32 is finest: hence
    -log(-log(1 - u)) by log1p, and not -log(-log(u)) whose top would be a few coarse steps.
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, jnp.float32(1 - 2.0**-24))  # the largest words round up to 1
    return -jnp.log(-jnp.log1p(-uniform))


def gumbel(seed: jax.Array, position: jax.Array, vocab_ids: jax.Array) -> jax.Array:
    """Noise of a draw, a pure function of (request seed, absolute position, vocabulary id).

    Args:
        seed: uint32 [..., 2], the request's.
        position: int32 [...], the absolute position of the token to be drawn; leading axes
            broadcast against the seed's.
        vocab_ids: uint32 [V], any part of the vocabulary: a shard computes its own slice.

    Returns:
        float32 [..., V].
    """
    key = seed[..., 0, None], seed[..., 1, None]
    counter = position[..., None].astype(jnp.uint32), vocab_ids.astype(jnp.uint32)
    return gumbel_from_bits(threefry2x32(key, counter)[0])


# Logits before the draw


def apply_bias(
    logits: jax.Array, bias_ids: jax.Array, bias_values: jax.Array, vocab: Group = ALONE
) -> jax.Array:
    """Adds each row's biases: logits [M, V], bias_ids int32 [M, NB], bias_values [M, NB] -> [M, V].

    An id that occurs twice gets both; ids outside 0 .. V - 1 (-1: none) are ignored.
    """
    rows, columns = _columns(logits, bias_ids, vocab)
    return logits.at[rows, columns].add(bias_values.astype(logits.dtype), mode="drop")


def forbid(logits: jax.Array, ids: jax.Array, mask: jax.Array, vocab: Group = ALONE) -> jax.Array:
    """Sets the logits of `ids` to -inf in the rows of `mask`.

    Args:
        logits: [M, V].
        ids: int32 [M, S]; ids outside 0 .. V - 1 (-1: none) are ignored.
        mask: bool [M]; the other rows are left as they are.
    """
    rows, columns = _columns(logits, jnp.where(mask[:, None], ids, -1), vocab)
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")


def _columns(logits: jax.Array, ids: jax.Array, vocab: Group) -> tuple[jax.Array, jax.Array]:
    """Scatter indices of ids [M, S]. A negative one would count from the end: it goes past it."""
    rows, width = logits.shape
    ids = vocab.local(ids, width)
    return jnp.arange(rows)[:, None], jnp.where(ids < 0, width, ids)


# Truncation

_MINUS_INF_IMAGE = 0x007FFFFF


def _float_of_image(image: jax.Array) -> jax.Array:
    """Inverse of the order-preserving map float32 -> uint32; images below -inf's count as -inf."""
    image = jnp.maximum(image, jnp.uint32(_MINUS_INF_IMAGE))
    sign = jnp.uint32(0x80000000)
    return lax.bitcast_convert_type(jnp.where(image >= sign, image ^ sign, ~image), jnp.float32)


def _largest_float(holds: Callable[[jax.Array], jax.Array], rows: tuple[int, ...]) -> jax.Array:
    """The largest float32 at which `holds`, per row; it must hold at all smaller ones, too.

    Exact, in 32 evaluations: a bisection on the integer image, one bit after the other. -inf if
    it holds nowhere; NaN if it holds everywhere.
    """

    def try_bit(step: jax.Array, image: jax.Array) -> jax.Array:
        candidate = image | (jnp.uint32(0x80000000) >> step.astype(jnp.uint32))
        return jnp.where(holds(_float_of_image(candidate)), candidate, image)

    return _float_of_image(lax.fori_loop(0, 32, try_bit, jnp.zeros(rows, jnp.uint32)))


def truncate(
    logits: jax.Array,
    *,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    vocab: Group = ALONE,
) -> jax.Array:
    """Sets the logits of unlikely tokens to -inf: min-p, then top-k, then top-p of what is left.

    Each rule keeps the tokens whose logit reaches a threshold, so equal logits share their fate and
    the most likely token always stays. The thresholds are found by bisection: a pass over the
    logits is a comparison and a sum, where sorting 163,840 of them is not (on the bundled model's
    2,048 a sort takes ten times as long).

    Args:
        logits: float32 [..., V], divided by the temperature; -inf allowed, NaN not.
        top_k: int32 [...], 0 is off. Keeps the k-th largest logit and all that reach it.
        top_p: float32 [...] in (0, 1], 1 is off. Keeps the smallest set of the largest
            probabilities, renormalised after top-k, whose sum reaches it.
        min_p: float32 [...], 0 is off. Keeps probabilities of at least min_p times the largest.

    Returns:
        float32 [..., V].
    """
    rows = logits.shape[:-1]
    highest = vocab.max(jnp.max(logits, axis=-1))
    k = jnp.where(top_k > 0, top_k, logits.shape[-1] * vocab.size)

    def k_reach(threshold: jax.Array) -> jax.Array:
        return vocab.sum(jnp.sum(logits >= threshold[..., None], axis=-1)) >= k

    # Both rules keep all logits from some value up, so the stricter of the two is their order.
    threshold = jnp.maximum(highest + jnp.log(min_p), _largest_float(k_reach, rows))

    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)  # a row of -inf alone has no weights
    weights = jnp.where(logits >= threshold[..., None], jnp.exp(logits - finite[..., None]), 0.0)
    needed = top_p * vocab.sum(jnp.sum(weights, axis=-1))

    def mass_reaches(threshold: jax.Array) -> jax.Array:
        kept = jnp.sum(jnp.where(logits >= threshold[..., None], weights, 0.0), axis=-1)
        return vocab.sum(kept) >= needed

    nucleus = _largest_float(mass_reaches, rows)
    # Rounding may let the sum reach 1 without the last tokens, or `needed` round down to 0.
    nucleus = jnp.where(top_p >= 1, -jnp.inf, jnp.where(nucleus <= highest, nucleus, highest))
    threshold = jnp.maximum(threshold, nucleus)
    return jnp.where(logits >= threshold[..., None], logits, -jnp.inf)


# The draw


def draw(
    logits: jax.Array,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    noise: jax.Array,
    vocab: Group = ALONE,
) -> jax.Array:
    """Draws one token a row; greedy and sampled rows mix freely.

    Args:
        logits: float32 [M, V], after bias and forbidden ids.
        temperature: float32 [M]; 0 takes the largest logit, the lowest id among equals.
        top_k, top_p, min_p: [M], see `truncate`.
        noise: float32 [M, V], see `gumbel`.

    Returns:
        int32 [M], vocabulary ids.
    """
    sampled = (temperature > 0)[:, None]
    scaled = logits / jnp.where(sampled, temperature[:, None], 1.0)
    kept = truncate(scaled, top_k=top_k, top_p=top_p, min_p=min_p, vocab=vocab)
    return likeliest(kept + jnp.where(sampled, noise, 0.0), vocab)


def likeliest(scores: jax.Array, vocab: Group = ALONE) -> jax.Array:
    """The id of the largest score of each row, the lowest among equals: [M, V] -> int32 [M]."""
    # `jnp.argmax` says the same, but XLA's CPU code for it is scalar, and so is the noise that it
    # fuses into it: 0.9 against 0.4 ms for [9, 2048].
    width = scores.shape[-1]
    reaches = scores == vocab.max(jnp.max(scores, axis=-1, keepdims=True))
    ids = vocab.first(width) + jnp.arange(width, dtype=jnp.int32)
    return vocab.min(jnp.min(jnp.where(reaches, ids, width * vocab.size - 1), axis=-1))


def log_softmax(logits: jax.Array, vocab: Group = ALONE) -> jax.Array:
    """Log-probabilities at temperature 1 of float32 [..., V]."""
    if vocab.size == 1:
        return jax.nn.log_softmax(logits, axis=-1)
    shifted = logits - vocab.max(jnp.max(logits, axis=-1, keepdims=True))
    return shifted - jnp.log(vocab.sum(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)))


def pick(values: jax.Array, ids: jax.Array, vocab: Group = ALONE) -> jax.Array:
    """The values [..., V] at vocabulary ids [...]."""
    if vocab.size == 1:
        return jnp.take_along_axis(values, ids[..., None], axis=-1)[..., 0]
    place = vocab.local(ids, values.shape[-1])
    mine = jnp.take_along_axis(values, jnp.maximum(place, 0)[..., None], axis=-1)[..., 0]
    return vocab.sum(jnp.where(place >= 0, mine, 0.0))


def top(values: jax.Array, k: int, vocab: Group = ALONE) -> tuple[jax.Array, jax.Array]:
    """The k largest values [..., V] and their ids [..., k], the lowest id first among equals.

    Each device sends its own k; they arrive in order of id, which decides between equals.
    """
    best, columns = lax.top_k(values, min(k, values.shape[-1]))
    if vocab.size == 1 or k == 0:  # an empty array cannot be gathered
        return best, columns
    axis = values.ndim - 1
    ids = vocab.gather(columns + vocab.first(values.shape[-1]), axis)
    best, columns = lax.top_k(vocab.gather(best, axis), k)
    return best, jnp.take_along_axis(ids, columns, axis=-1)


def logprob_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities at temperature 1: logits [..., V], tokens [...] -> float32 [...]."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
