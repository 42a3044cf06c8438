"""Every program ends in one line and an exit code."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.support.documented_launches import import_program
from utils.errors import UserError
from utils.programs import (
    CommandLine,
    create_program_parser,
    get_run_flags,
    pause_collection,
    run_program,
)


def fail(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (1, 1), (75, 75)])
def test_a_successful_program_returns_its_code_silently(capsys, given, code):
    assert run_program(lambda value: value, given) == code
    assert capsys.readouterr() == ("", "")


def test_a_user_error_gives_one_line_and_code_2(capsys):
    assert run_program(fail, UserError("a.key (3)\n  is wrong;\tuse 4 ")) == 2
    assert capsys.readouterr() == ("", "error: a.key (3) is wrong; use 4\n")


@pytest.mark.parametrize(
    ("tool", "shown", "without"),
    [
        ("shape_advisor", "images on each device (default: 64)", "write the table here"),
        ("compile_for_tpu", "1: one device (default: 1)", "the run's YAML"),
        ("proofs.kd_table", "epochs of each teacher (default: 40)", "methods to run (all)"),
    ],
)
def test_help_shows_existing_defaults(capsys, tool, shown, without):
    with pytest.raises(SystemExit):
        import_program(f"tools.{tool}").main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert shown in text
    assert without in text and f"{without} (default" not in text
    assert "None" not in text


def test_a_silent_rank_leaves_the_message_to_another(capsys):
    assert run_program(fail, UserError("wrong"), is_silent=True) == 2
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_gives_the_programs_line_and_code_130(capsys):
    assert run_program(fail, KeyboardInterrupt()) == 130
    assert run_program(fail, KeyboardInterrupt(), interrupted="come again", is_silent=True) == 130
    assert capsys.readouterr() == ("", "interrupted\ncome again\n")


def test_any_other_error_is_not_hidden():
    with pytest.raises(ValueError, match="ours"):
        run_program(fail, ValueError("ours"))


def test_help_keeps_the_lines_of_the_docstring():
    parser = create_program_parser("Does it.\n\n    python -m x --a\n", prog="python -m x")
    assert "\n\n    python -m x --a\n" in parser.format_help()
    assert parser.format_help().startswith("usage: python -m x [-h] [--errors {text,json}]\n")


def test_a_wrong_flag_gives_one_line_and_code_2_for_verbs_too(capsys):
    parser = create_program_parser("Does it.", prog="python -m x")
    verb = parser.add_subparsers().add_parser("do")
    verb.add_argument("--times", type=int)
    for words, told in (
        (
            ["do", "--times", "x"],
            "error: argument --times: invalid int value: 'x'; see python -m x do",
        ),
        (["undo"], "error: argument "),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(words)
        text = capsys.readouterr().err
        assert text.startswith(told)
        assert text.endswith(" --help\n")
        assert text.count("\n") == 1


def test_a_url_is_never_read_as_a_path(capsys):
    """`Path("gs://bucket/x")` would become a directory `gs:` of this machine."""
    parser = create_program_parser("Does it.", prog="python -m x")
    verb = parser.add_subparsers().add_parser("do")
    verb.add_argument("--out", type=Path)
    assert parser.parse_args(["do", "--out", "file:///tmp/x"]).out == Path("/tmp/x")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["do", "--out", "gs://bucket/x"])
    told = "error: argument --out: 'gs://bucket/x' is a URL, but a local path is needed; use a path"
    assert capsys.readouterr().err.startswith(told)


def test_garbage_collection_pauses_and_stays_off_if_it_was_off():
    assert gc.isenabled()
    with pytest.raises(ValueError, match="ours"), pause_collection():
        assert not gc.isenabled()
        with pause_collection():
            pass
        assert not gc.isenabled()
        raise ValueError("ours")
    assert gc.isenabled()


def create_small_parser():
    parser = create_program_parser("Does it.", prog="python -m x")
    parser.add_argument("--config", default="")
    return parser


def count_words(options) -> int:
    return len(options.words)


def test_a_program_is_a_parser_and_a_function_or_its_name():
    words = ["--config", "a.yaml"]
    assert CommandLine(create_small_parser, count_words)(words) == 2
    assert CommandLine(create_small_parser, f"{__name__}:count_words")(words) == 2
    assert CommandLine(create_small_parser, f"{__name__}:fail_of_user")([]) == 2


def fail_of_user(_: object) -> int:
    raise UserError("wrong")


def test_run_keys_are_kept_by_programs_that_take_them_and_refused_by_others(capsys):
    main = CommandLine(create_small_parser, count_words, takes_keys=True)
    options = main.parse(["--config", "a.yaml", "--train.steps=3"])
    assert get_run_flags(options) == ["--config", "a.yaml", "--train.steps=3"]
    assert get_run_flags(main.parse(["--train.steps=3"])) == ["--train.steps=3"]
    with pytest.raises(SystemExit, match="2"):
        CommandLine(create_small_parser, count_words)(["--train.steps=3"])
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: --train.steps=3; see")
