import pytest
from absl import flags

from kimi_jax.cli import arguments


@pytest.fixture
def values():
    values = flags.FlagValues()
    flags.DEFINE_string("prompt", None, "Text.", flag_values=values)
    flags.DEFINE_integer("max_tokens", 5, "Most.", flag_values=values)
    flags.DEFINE_bool("dry_run", False, "Only plan.", flag_values=values)
    flags.DEFINE_bool("chat", True, "Template.", flag_values=values)
    return values


def test_dashes_do_for_underscores(values):
    arguments.parse(["--max-tokens", "7", "--dry-run", "--no-chat"], values)
    assert (values.max_tokens, values.dry_run, values.chat) == (7, True, False)


def test_dashes_in_values_stay(values):
    arguments.parse(["--prompt", "--max-tokens"], values)
    assert (values.prompt, values.max_tokens) == ("--max-tokens", 5)
    arguments.parse(["--prompt=--dry-run a-b"], values)
    assert (values.prompt, values.dry_run) == ("--dry-run a-b", False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--promt", "x"], "'promt'.*Did you mean: prompt"),
        (["--max_tokens", "many"], "max_tokens=many: invalid literal"),
        (["--max_tokens"], "max_tokens"),
        (["hello"], "unexpected argument 'hello'; a prompt is given as --prompt 'hello'"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error_that_names_it(values, given, message):
    with pytest.raises(arguments.UsageError, match=message):
        arguments.parse(given, values)


def test_help_lists_the_flags_of_each_group_with_their_defaults(values):
    page = arguments.help_text("What it does.", {"One": {"max_tokens": "", "chat": "Own."}}, values)
    lines = page.splitlines()
    assert lines[0] == "What it does."
    assert "One:" in lines
    assert "  --max_tokens              Most. (default 5)" in lines
    assert "  --[no]chat                Own." in lines
