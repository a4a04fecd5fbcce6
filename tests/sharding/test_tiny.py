"""The bundled model on eight devices writes what it writes on one: greedy, and at T = 0.8."""

import json
from pathlib import Path

import fresh_process
import pytest
import test_lossless

TESTS = Path(test_lossless.__file__).parent
COUNT, TOKENS = 3, 40
PROGRAM = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
folder, sharding, count, tokens = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, folder)
import test_lossless
from kimi_jax import LLM

llm = LLM(sharding=sharding, tree_budget=8, max_num_seqs=2 * count, max_model_len=256)
results = llm.generate(*test_lossless.requests(count, tokens))
print(json.dumps({
    "devices": llm.setup.layout.num_devices,
    "ids": [result.token_ids for result in results],
    "accepted": [result.stats.accepted_per_step for result in results],
}))
"""


@pytest.mark.parametrize("sharding", ["tp", "ep"])
def test_eight_devices_write_one_devices_text(sharding, full):
    count, tokens = (24, 96) if full else (COUNT, TOKENS)
    got = json.loads(fresh_process.run(PROGRAM, TESTS, sharding, count, tokens))
    assert got["devices"] == 8
    assert sum(got["accepted"]) / len(got["accepted"]) > 1.3  # trees are walked, not only verified
    expected = test_lossless.plain(count, tokens)
    prompts, params = test_lossless.requests(count, tokens)
    test_lossless.assert_same_texts(list(map(tuple, got["ids"])), expected, prompts, params)
