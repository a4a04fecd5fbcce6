import pytest

from kimi_jax.engine.budget import BUCKETS, UNTUNED, AutoBudget, Choice, FixedBudget, bucket_for

STEPS = 4  # a call


def test_the_bucket_is_the_smallest_that_serves():
    assert [bucket_for(n) for n in (0, 1, 8, 9, 16, 17, 63)] == [0, 8, 8, 16, 16, 63, 63]


@pytest.mark.parametrize("budget", [-1, 64])
def test_a_budget_outside_0_to_63_is_refused(budget):
    with pytest.raises(ValueError, match=f"tree_budget={budget}: expected 'auto' or a number in"):
        bucket_for(budget)


def test_a_fixed_budget_gives_everybody_the_same():
    budget = FixedBudget(5)
    assert budget.buckets == (8,)
    assert budget.choose([3, 1]) == Choice(bucket=8, nodes=(5, 5))


def drive(budget, seconds, tokens, *, until, sequences=(0,)):
    """Runs calls until each sequence has `until` tokens; returns (seconds, calls by bucket).

    seconds: of a step by bucket; tokens: a step by bucket, in the mean.
    """
    total, made, calls = 0.0, 0.0, dict.fromkeys(budget.buckets, 0)
    owed = 0.0
    while made < until:
        choice = budget.choose(list(sequences))
        calls[choice.bucket] += 1
        counts = []
        for _ in range(STEPS):  # whole tokens that have the mean
            owed += tokens[choice.bucket] if any(choice.nodes) else 1.0
            counts.append(int(owed))
            owed -= counts[-1]
        made += sum(counts)
        total += STEPS * seconds[choice.bucket]
        budget.observe(choice, dict.fromkeys(sequences, counts), seconds[choice.bucket])
    return total, calls


@pytest.mark.parametrize("factor", [1.05, 1.5, 2.5, 4.0])
def test_a_useless_drafter_costs_at_most_3_percent_over_1000_tokens(factor):
    seconds = {0: 1.0, 8: factor}
    total, _ = drive(AutoBudget(), seconds, {0: 1.0, 8: 1.0}, until=1000)
    assert total <= 1.03 * 1000


def test_a_good_drafter_is_used_nearly_always():
    _, calls = drive(AutoBudget(), {0: 1.0, 8: 2.0}, {0: 1.0, 8: 3.0}, until=1000)
    assert calls[0] <= 2 and calls[8] >= 80


def test_a_drafter_that_becomes_good_is_noticed():
    budget = AutoBudget()
    drive(budget, {0: 1.0, 8: 2.0}, {0: 1.0, 8: 1.0}, until=2000)
    _, calls = drive(budget, {0: 1.0, 8: 2.0}, {0: 1.0, 8: 4.0}, until=12000)
    assert calls[8] > calls[0] / 4


def test_trees_are_taken_up_when_their_programs_are_there():
    budget = AutoBudget()
    for _ in range(5):
        choice = budget.choose([0], built=[0])
        assert choice == Choice(bucket=0, nodes=(0,))
        budget.observe(choice, {0: [1] * STEPS}, 1.0)
    assert budget.choose([0], built=[0, 8]) == Choice(bucket=8, nodes=(8,))
    assert AutoBudget().choose([0], built=[]) == Choice(bucket=0, nodes=(0,))


def test_without_a_table_only_the_first_two_buckets_are_asked_for():
    assert AutoBudget().buckets == UNTUNED == (0, 8)


def table(times):
    return {(bucket, n): times[bucket] * n for bucket in BUCKETS for n in (1, 4)}


def test_with_a_table_the_bucket_with_the_most_tokens_a_second_wins():
    tokens = {0: 1.0, 8: 2.8, 16: 3.1, 63: 3.6}
    cheap = AutoBudget(table({0: 1.0, 8: 1.1, 16: 1.15, 63: 1.2}))
    assert cheap.buckets == BUCKETS
    _, calls = drive(cheap, {0: 1.0, 8: 1.1, 16: 1.15, 63: 1.2}, tokens, until=1000)
    assert max(calls, key=calls.__getitem__) == 63
    dear = AutoBudget(table({0: 1.0, 8: 1.5, 16: 3.0, 63: 9.0}))
    _, calls = drive(dear, {0: 1.0, 8: 1.5, 16: 3.0, 63: 9.0}, tokens, until=1000)
    assert max(calls, key=calls.__getitem__) == 8


def test_a_sequence_whose_drafts_all_fail_gets_no_nodes_beside_one_whose_succeed():
    budget = AutoBudget(table({0: 1.0, 8: 1.1, 16: 9.0, 63: 9.0}))
    choice = budget.choose([1, 2])
    for _ in range(100):
        if choice.bucket:
            budget.observe(choice, {1: [4] * STEPS, 2: [1] * STEPS}, None)
        choice = budget.choose([1, 2])
    assert choice == Choice(bucket=8, nodes=(8, 0))
    budget.forget(2)
    assert budget.choose([1, 2]).nodes == (8, 8)
