"""The bundled model on eight devices writes what it writes on one: greedy, and at T = 0.8."""

import json
from pathlib import Path

import fresh_process
import pytest
import test_lossless
from texts import assert_same_texts, requests

TESTS = Path(test_lossless.__file__).parent
COUNT, TOKENS = 3, 40
PROGRAM = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
folder, sharding, count, tokens = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, folder)
from kimi_jax import LLM
from kimi_jax.sharding import balance
from texts import requests

options = {"tree_budget": 8, "max_num_seqs": 2 * count, "max_model_len": 256, "sharding": sharding}
llm = LLM(**options)
results = llm.generate(*requests(count, tokens))
found = {
    "devices": llm.setup.layout.num_devices,
    "ids": [result.token_ids for result in results],
    "accepted": [result.stats.accepted_per_step for result in results],
}
if sharding == "ep":
    texts = [[*result.prompt_token_ids, *result.token_ids] for result in results]
    counts_of_first = llm.expert_counts(texts[0])
    counts = counts_of_first + sum(llm.expert_counts(text) for text in texts[1:])
    balance.save("counts.json", counts)
    del llm
    placed = LLM(expert_placement="counts.json", **options)
    results = placed.generate(*requests(count, tokens))
    found["placed"] = [result.token_ids for result in results]
    found["same counts"] = bool((placed.expert_counts(texts[0]) == counts_of_first).all())
    orders = None, placed.setup.expert_order
    found["uneven"] = [balance.unevenness(balance.load(counts, 8, how)) for how in orders]
print(json.dumps(found))
"""


@pytest.mark.parametrize("sharding", ["tp", "ep"])
def test_eight_devices_write_one_devices_text(sharding, full, tmp_path, monkeypatch):
    count, tokens = (24, 96) if full else (COUNT, TOKENS)
    monkeypatch.chdir(tmp_path)
    got = json.loads(fresh_process.run(PROGRAM, TESTS, sharding, count, tokens))
    assert got["devices"] == 8
    assert sum(got["accepted"]) / len(got["accepted"]) > 1.3  # trees are walked, not only verified
    expected = test_lossless.plain(count, tokens)
    prompts, params = requests(count, tokens)
    texts = [got["ids"]] if sharding == "tp" else [got["ids"], got["placed"]]
    for ids in texts:
        assert_same_texts(
            test_lossless.engine(0),
            list(map(tuple, ids)),
            expected,
            prompts,
            params,
            near_tie=test_lossless.NEAR_TIE,
        )
    if sharding == "ep":
        assert got["same counts"], "an expert is counted by its own number, wherever it lies"
        uneven, spread = got["uneven"]
        assert 1 <= spread < uneven
