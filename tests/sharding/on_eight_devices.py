"""Program: a small random model under the meshes that are named; prints JSON, one entry a mesh.

A process of its own, since the number of devices is fixed when JAX starts. Everything is compared
with one device here, so that only the outcome is printed.
"""

import dataclasses
import functools
import json
import os
import re
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import cache as paged
from kimi_jax import sampling, step
from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.engine.compiling import enable_persistent_cache
from kimi_jax.model import weights as target_weights
from kimi_jax.sharding.layout import SINGLE
from kimi_jax.sharding.mesh import Shape, make_layout
from kimi_jax.speculation import tree as ddtree
from kimi_jax.speculation import weights as drafter_weights

SPECIAL = {"bos_token_id": 500, "eos_token_ids": (501, 502), "pad_token_id": 503}
TARGET = dataclasses.replace(
    PRESETS["tiny-k2"], num_hidden_layers=3, num_attention_heads=16, vocab_size=512, **SPECIAL
)
DRAFTER = dataclasses.replace(
    DRAFTER_PRESETS["tiny-k2"],
    num_hidden_layers=1,
    layer_types=("full_attention",),
    target_layer_ids=(0, 2),
    vocab_size=512,
    mask_token_id=504,
)
# Five sequences divide over no mesh: plain decoding and trees of 4, 16, 33, greedy and sampled.
LENGTHS = (3, 9, 15, 6, 12)
LIVE = (0, 4, 16, 33, 33)
TEMPERATURES = (0.0, 0.8, 0.0, 0.8, 0.0)
BIAS = 7, 1.0
TRUNCATION = {"top_k": 50, "top_p": 0.95, "min_p": 0.001}
BUDGET, STEPS = 33, 64
PAGE, PAGES, CHUNK = 16, 34, 96  # a step may emit 8 tokens: 64 of them, behind 15
COMPARED = 80  # tokens of a sequence, at most

MESHES = {
    "tp1": Shape(),
    "tp2": Shape(tensor=2),
    "tp4": Shape(tensor=4),
    "tp8": Shape(tensor=8),
    "ep2": Shape(expert=2),
    "ep4": Shape(expert=4),
    "ep8": Shape(expert=8),
    "mixed4": Shape(expert=2, tensor=2),
    "mixed8": Shape(expert=4, tensor=2),
    "mixed8t": Shape(expert=2, tensor=4),
    "data2": Shape(data=2),
    "data4": Shape(data=4),
    "data8": Shape(data=8),
    "context2": Shape(tensor=2, split_context=True),
    "context4": Shape(tensor=4, split_context=True),
    "context8": Shape(expert=2, tensor=4, split_context=True),
    "all8": Shape(data=2, expert=2, tensor=2),
    "travel4": Shape(data=4, experts_over_data=True),
    "travel8": Shape(data=4, expert=2, experts_over_data=True),
}


@functools.cache
def weights(variant: str = "all") -> target_weights.Weights:
    """Random weights; "routed": without shared experts, "shared": without routed ones."""
    if variant == "all":
        return target_weights.random(TARGET, jnp.float32, jax.random.key(0))

    def without(layer):
        moe = layer.mlp
        if isinstance(moe, target_weights.DenseMLP):
            return layer
        part = moe.shared if variant == "routed" else moe.experts
        blank = jax.tree.map(jnp.zeros_like, part)
        if variant == "shared":  # codes stay, so that the experts are still visited
            blank = dataclasses.replace(moe.experts, down_scales=blank.down_scales)
        name = "shared" if variant == "routed" else "experts"
        return dataclasses.replace(layer, mlp=dataclasses.replace(moe, **{name: blank}))

    return dataclasses.replace(weights(), layers=tuple(map(without, weights().layers)))


def drafter() -> drafter_weights.DrafterWeights:
    return drafter_weights.random(DRAFTER, jnp.float32, jax.random.key(1))


def prompts() -> list[np.ndarray]:
    return [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in LENGTHS]


class Run:
    """The model on one mesh."""

    def __init__(self, shape: Shape):
        self.layout = make_layout(shape)
        self.plan = step.StepPlan(
            model=TARGET, drafter=DRAFTER, budget=BUDGET, num_logprobs=4, layout=self.layout
        )
        self.specs = step.Specs(self.plan)
        self.groups = self.layout.data_size
        self.each = -(-len(LENGTHS) // self.groups)  # slots of a group; some idle
        self.slots = self.each * self.groups
        own = (np.arange(self.slots) % self.each)[:, None] * PAGES
        self.table = (1 + own + np.arange(PAGES)).astype(np.int32)
        self.target = self.place(weights(), self.specs.weights)
        self.drafter = self.place(drafter(), self.specs.drafter)

    def place(self, tree, specs):
        return jax.device_put(tree, self.layout.shardings(specs)) if self.layout.mesh else tree

    def by_slot(self, tree):
        return self.place(tree, jax.tree.map(lambda _: self.specs.slots, tree))

    def filled(self, values, dtype):
        """By slot, from values by sequence."""
        return np.array([*values, *[0] * (self.slots - len(LENGTHS))], dtype)

    def chunk(self, slot: int, text) -> tuple:
        """A text as `prefill` takes it; the slot's group along data writes it."""
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(text)] = text
        own = (self.table[slot], padded, np.int32(0), np.int32(len(text)))
        if self.groups == 1:
            return own
        mine = slot // self.each
        parts = [
            [part if g == mine else np.zeros_like(part) for g in range(self.groups)] for part in own
        ]
        return tuple(np.stack(part) for part in parts)

    def empty(self) -> step.State:
        pages = self.groups * (1 + self.each * PAGES)
        state = step.State(
            cache=paged.create(TARGET, DRAFTER, num_pages=pages, page_size=PAGE, dtype=jnp.float32),
            length=jnp.zeros(self.slots, jnp.int32),
            token=jnp.zeros(self.slots, jnp.int32),
            active=jnp.zeros(self.slots, bool),
        )
        return self.place(state, self.specs.state)

    def prefilled(self) -> step.State:
        state, texts = self.empty(), prompts()
        plan = dataclasses.replace(self.plan, budget=0, num_logprobs=0)
        for slot, text in enumerate(texts):
            chunk = self.chunk(slot, text[:-1])
            state = step.prefill(self.target, self.drafter, state, *chunk, plan=plan)
        state = dataclasses.replace(
            state,
            length=self.filled([n - 1 for n in LENGTHS], np.int32),
            token=self.filled([text[-1] for text in texts], np.int32),
            active=self.filled([True] * len(LENGTHS), bool),
        )
        return self.place(state, self.specs.state)

    def control(self, bias: tuple[int, float] = BIAS) -> step.Control:
        def full(value, dtype, *shape):
            return np.full((self.slots, *shape), value, dtype)

        return self.by_slot(
            step.Control(
                page_table=self.table,
                max_length=full(PAGE * PAGES, np.int32),
                min_length=full(0, np.int32),
                stop_ids=full(-1, np.int32, 1),
                temperature=self.filled(TEMPERATURES, np.float32),
                seed=np.stack([np.arange(self.slots), np.ones(self.slots)], 1).astype(np.uint32),
                bias_ids=full(bias[0], np.int32, 1),
                bias_values=full(bias[1], np.float32, 1),
                n_live=self.filled(LIVE, np.int32),
                top_k=full(TRUNCATION["top_k"], np.int32),
                top_p=full(TRUNCATION["top_p"], np.float32),
                min_p=full(TRUNCATION["min_p"], np.float32),
            )
        )

    @functools.cached_property
    def decode(self):
        """The compiled steps, STEPS of them."""
        lowered = step.decode_steps.lower(
            *(self.target, self.drafter, self.empty(), self.control()), plan=self.plan, steps=STEPS
        )
        return lowered.compile()

    def generate(self, control: step.Control, state: step.State) -> tuple[list, list, bool]:
        """Tokens and their log-probabilities by sequence; whether all devices agree bit for bit."""
        _, output = self.decode(self.target, self.drafter, state, control)
        host = jax.device_get(output)
        taken = np.arange(host.tokens.shape[-1]) < host.count[..., None]  # [steps, B, DEPTH + 1]
        texts = [host.tokens[:, slot][taken[:, slot]] for slot in range(len(LENGTHS))]
        values = [host.logprobs[:, slot][taken[:, slot]] for slot in range(len(LENGTHS))]
        return texts, values, all(map(agree, jax.tree.leaves(output)))

    def score(self, text, variant: str = "all") -> np.ndarray:
        """Teacher-forced logits of one text."""
        model = self.place(weights(variant), self.specs.weights)
        last = len(LENGTHS) - 1
        latent = self.empty().cache.latent
        logits, _ = step.score(
            model,
            latent,
            *self.chunk(last, text),
            plan=step.StepPlan(model=TARGET, layout=self.layout),
        )
        host = np.asarray(logits)
        return (host if self.groups == 1 else host[last // self.each])[: len(text)]

    def verify(self, state: step.State) -> np.ndarray:
        """Logits [sequences, 1 + BUDGET, VOCAB] of a step's rows: random trees of LIVE nodes."""
        trees = random_trees()
        idle = self.slots - len(LENGTHS)
        trees = jax.tree.map(lambda x: np.pad(x, ((0, idle), *((0, 0),) * (x.ndim - 1))), trees)

        def run(weights, state, control, tree):
            logits = step.forward(weights, state, control, tree, plan=self.plan).logits
            return logits.reshape(tree.tokens.shape[0], 1 + BUDGET, -1)

        specs = self.specs
        logits = jax.jit(
            self.layout.spmd(
                run,
                (specs.weights, specs.state, specs.slots, specs.slots),
                self.layout.spec("slots", "rows", "vocab"),
            )
        )(self.target, state, self.control(), self.by_slot(trees))
        return np.where(trees.live[..., None], logits, 0)[: len(LENGTHS)]


def random_trees() -> ddtree.Tree:
    rng = np.random.default_rng(0)
    shape = len(LENGTHS), 1 + BUDGET
    live = np.arange(1 + BUDGET) <= np.array(LIVE)[:, None]
    parents, depths = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    sees = np.zeros((*shape, 1 + BUDGET), bool)
    for b, row in np.argwhere(live):
        if row:
            parents[b, row] = rng.integers(0, row)
            depths[b, row] = depths[b, parents[b, row]] + 1
            sees[b, row] = sees[b, parents[b, row]]
        sees[b, row, row] = True
    return ddtree.Tree(
        tokens=rng.integers(0, 256, shape).astype(np.int32),
        parents=parents,
        depths=depths,
        ancestors=np.asarray(ddtree.words(jnp.asarray(sees))),
        live=live,
    )


def agree(array: jax.Array) -> bool:
    """Whether all devices that should hold the same values do, bit for bit."""
    by_index: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        first = by_index.setdefault(str(shard.index), np.asarray(shard.data))
        if not np.array_equal(first, shard.data):
            return False
    return True


@dataclasses.dataclass
class Yardstick:
    """What one device gives."""

    texts: list
    logprobs: list
    margins: list  # of every draw, by teacher forcing
    best: list  # what teacher forcing draws
    verify: np.ndarray
    scores: dict

    @classmethod
    @functools.cache
    def measured(cls) -> "Yardstick":
        one = Run(Shape())
        state = one.prefilled()
        verify = one.verify(state)
        texts, logprobs, _ = one.generate(one.control(), state)
        margins, best = [], []
        for slot, (prompt, text) in enumerate(zip(prompts(), texts, strict=True)):
            drawn = draws(one.score([*prompt, *text[: COMPARED - 1]]), slot)[len(prompt) - 1 :]
            top, ids = jax.lax.top_k(drawn, 2)
            margins.append(np.asarray(top[:, 0] - top[:, 1]))
            best.append(np.asarray(ids[:, 0]))
        scores = {v: one.score(example(), v) for v in ("all", "routed", "shared")}
        return cls(texts, logprobs, margins, best, verify, scores)


def draws(logits: np.ndarray, slot: int) -> jax.Array:
    """The scores whose maximum is drawn, from the logits of positions 0, 1, .."""
    rows = logits.shape[0]
    flat = jnp.asarray(logits).at[:, BIAS[0]].add(BIAS[1])
    temperature = TEMPERATURES[slot]
    if temperature == 0:
        return flat
    limits = {name: jnp.full(rows, value) for name, value in TRUNCATION.items()}
    ids = jnp.arange(TARGET.vocab_size, dtype=jnp.uint32)
    seed = jnp.array([slot, 1], jnp.uint32)
    noise = sampling.gumbel(seed, 1 + jnp.arange(rows), ids)
    return sampling.truncate(flat / temperature, **limits) + noise


def example() -> np.ndarray:
    return np.random.default_rng(9).integers(0, 256, COMPARED).astype(np.int32)


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def compare(name: str) -> dict:
    begin = time.perf_counter()
    expected, here = Yardstick.measured(), Run(MESHES[name])
    state = here.prefilled()
    verify = relative(here.verify(state), expected.verify)
    texts, logprobs, same = here.generate(here.control(), state)
    differences, apart = [], 0.0
    for slot, (got, reference) in enumerate(zip(texts, expected.texts, strict=True)):
        length = min(len(got), len(reference), COMPARED)
        unequal = np.flatnonzero(got[:length] != reference[:length])
        if unequal.size:
            length = int(unequal[0])
            differences.append([slot, length, float(expected.margins[slot][length])])
        apart = max(apart, np.abs(logprobs[slot] - expected.logprobs[slot])[:length].max(initial=0))
    return {
        "differences": differences,  # [sequence, first differing token, margin of its draw]
        "logprobs": float(apart),
        "agree": same,
        "verify": verify,
        "scores": {v: relative(here.score(example(), v), s) for v, s in expected.scores.items()},
        "collectives": collectives(here.decode.as_text()),
        "seconds": time.perf_counter() - begin,
    }


def collectives(text: str) -> list[list]:
    """[kind, where in the step, elements, mesh axes] of each collective in the HLO."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r"= (\(?\S+.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
            r"(?:-start)?\(",
            line,
        )
        if not match:
            continue
        sizes = [
            int(np.prod([int(n) for n in dims.split(",") if n] or [1]))
            for dims in re.findall(r"\[([\d,]*)\]", match[1])
        ]
        scope = re.search(r'op_name="([^"]*)"', line)
        axes = re.search(r"replica_groups=mesh\[[^]]*\] \{([^}]*)\}", line)
        if not scope or not axes:
            raise ValueError(f"a collective without a name or mesh axes: {line}")
        found.append([match[2], scope[1], sum(sizes), re.findall(r"'(\w+)'", axes[1])])
    return found


def vocabulary(name: str) -> dict:
    """What a mesh makes of logits whose maximum lies in each shard in turn, and of equal maxima.

    Row k has its maximum in shard k; the other rows have one in each of two shards. Every entry
    says whether the mesh found what one device finds in the whole rows.
    """
    layout = make_layout(MESHES[name])
    vocab = layout.group("vocab")
    share = TARGET.vocab_size // vocab.size
    maxima = [(k,) for k in range(vocab.size)]
    maxima += [(a, b) for a in range(vocab.size) for b in range(a + 1, vocab.size)]
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(len(maxima), TARGET.vocab_size)).astype(np.float32)
    places = [[shard * share + int(rng.integers(share)) for shard in where] for where in maxima]
    for row, place in zip(logits, places, strict=True):
        row[place] = 9.0
    noise = np.asarray(sampling.gumbel(jnp.zeros((len(maxima), 2), jnp.uint32), *draw_at(logits)))

    def decide(logits, noise, vocab):
        rows = logits.shape[0]
        knobs = {name: jnp.full(rows, value) for name, value in TRUNCATION.items()}
        drawn = functools.partial(sampling.draw, logits, noise=noise, vocab=vocab, **knobs)
        best, ids = sampling.top(logits, 6, vocab)
        log_probs = sampling.log_softmax(logits, vocab)
        candidates = ddtree.top_candidates(
            log_probs[:, None], 6, forbidden=3, first_id=vocab.first(logits.shape[-1])
        )
        if vocab.size > 1:
            every = ddtree.Candidates(*(vocab.gather(part, axis=2) for part in candidates))
            candidates = ddtree.best_of(every, 6)
        return {
            "likeliest": sampling.likeliest(logits, vocab),
            "greedy": drawn(temperature=jnp.zeros(rows)),
            "sampled": drawn(temperature=jnp.full(rows, 0.8)),
            "top ids": ids,
            "top values": best,
            "candidates": candidates.ids,
        }

    split, whole = layout.spec("rows", "vocab"), layout.spec("rows")
    got = layout.spmd(functools.partial(decide, vocab=vocab), (split, split), whole)(logits, noise)
    expected = decide(jnp.asarray(logits), jnp.asarray(noise), SINGLE.group("vocab"))
    found = {key: bool(np.array_equal(got[key], expected[key])) for key in expected}
    lowest = np.array([min(place) for place in places])
    return found | {"lowest": bool(np.array_equal(got["likeliest"], lowest))}


def draw_at(logits: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """A position for each row, and all ids."""
    return jnp.arange(logits.shape[0]), jnp.arange(logits.shape[1], dtype=jnp.uint32)


def main(names: list[str]) -> dict:
    enable_persistent_cache()
    assert SINGLE.mesh is None and jax.device_count() == 8
    begin = time.perf_counter()
    one = Yardstick.measured()
    drawn = [
        text[:COMPARED] == best[: len(text)] for text, best in zip(one.texts, one.best, strict=True)
    ]
    results: dict = {
        "one": {
            "tokens": [len(text) for text in one.texts],
            "margins": [m.tolist() for m in one.margins],
            "drawn": [[bool(x) for x in row] for row in drawn],
            "apart": {
                v: float(np.abs(one.scores[v] - one.scores["all"]).max())
                for v in ("routed", "shared")
            },
            "seconds": time.perf_counter() - begin,
        },
    }
    vocabularies = results["vocabulary"] = {}
    for name in names:
        if MESHES[name].expert * MESHES[name].tensor == 8:
            vocabularies[name] = vocabulary(name)
        results[name] = compare(name)
        print(name, results[name]["seconds"], file=sys.stderr)
        jax.clear_caches()
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
