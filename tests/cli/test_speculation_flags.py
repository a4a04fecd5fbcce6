import types

import pytest

from kimi_jax.cli import speculation


def options(**flags):
    defaults = {"drafter": None, "tree_budget": None, "speculate": True, "speculative_config": None}
    return speculation.options(types.SimpleNamespace(**defaults | flags))


def test_by_default_the_models_own_drafter_is_used_with_an_automatic_budget():
    assert options() == {"drafter": "auto", "tree_budget": "auto"}


def test_flags_and_vllms_form_say_the_same():
    by_flags = options(drafter="folder", tree_budget="8")
    config = '{"method": "ddtree", "model": "folder", "tree_budget": 8}'
    assert options(speculative_config=config) == by_flags == {"drafter": "folder", "tree_budget": 8}


def test_without_speculation_there_is_no_drafter():
    assert options(speculate=False) == {"drafter": None, "tree_budget": 0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tree_budget": "many"}, "tree_budget='many': expected 'auto' or a number in 0..63"),
        ({"speculative_config": "{"}, "--speculative_config is not JSON"),
        ({"speculative_config": "[]"}, "expected an object with method, model, tree_budget"),
        ({"speculative_config": '{"num_speculative_tokens": 3}'}, "expected an object with"),
        (
            {"speculative_config": '{"method": "eagle3"}'},
            "method='eagle3' is unknown; use 'ddtree'",
        ),
        ({"speculative_config": '{"tree_budget": 8}', "tree_budget": "4"}, "--tree_budget and"),
        ({"speculate": False, "drafter": "folder"}, "--nospeculate excludes --drafter"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(flags, message):
    with pytest.raises(ValueError, match=message):
        options(**flags)
