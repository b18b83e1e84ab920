"""A `~` at the start of a path is the home folder, wherever a user names a path: a shell replaces it in some only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from remedies import executes

import dppo
from dppo.__main__ import main
from dppo.commands.discovery import command_modules
from dppo.commands.flags import Parser
from dppo.config import Config
from dppo.config.parts import types_by_name
from dppo.errors import CheckpointError, ConfigError
from dppo.files import home_expanded

PATHS = ("FILE", "DIR", "NEW_DIR", "RUN")
TRAINING: dict[str, Any] = {
    "env_id": "CartPole-v1",
    "num_samplers": 1,
    "num_steps": 16,
    "total_timesteps": 16,
    "hidden_sizes": (4,),
    "record_episodes": "none",
    "progress": "off",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder; the current folder is another one, which is empty."""
    folder = tmp_path / "home"
    folder.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(here)
    return folder


def settings_with_paths() -> Iterator[tuple[str, bool]]:
    """Yield each setting that is a path, and whether it is several."""
    for name, hint in types_by_name().items():
        if Path in get_args(hint) or hint is Path:
            yield name, get_origin(hint) is tuple


def test_a_home_folder_is_replaced_as_a_shell_does_it(home: Path) -> None:
    assert home_expanded("~") == str(home)
    assert home_expanded("~/runs/") == f"{home}/runs/", "the end says that it is a folder"
    assert home_expanded("~root/x").endswith("/x")
    for path in ("runs/~/x", "runs/a~", "/a/~b", "", "."):
        assert home_expanded(path) == path
    assert home_expanded("./~x") == f"{Path.cwd()}/./~x", "a folder of that name"


def test_each_setting_that_is_a_path_may_begin_with_the_home_folder(home: Path) -> None:
    path_settings = dict(settings_with_paths())
    assert path_settings == {
        "run_dir": False,
        "init_from": False,
        "state_folder": False,
        "upload": True,
    }

    for name, is_list in path_settings.items():
        needs: dict[str, Any] = {"num_actors": 1, "address": "auto"} if name == "upload" else {}
        for text in ("~/x", Path("~/x")):
            settings: dict[str, Any] = {name: [text] if is_list else text}
            config = Config(env_id="CartPole-v1", **needs, **settings)
            value = getattr(config, name)
            assert (value[0] if is_list else value) == home / "x"


@executes("files.py: no home folder is known for {}. Write the whole path.")
def test_the_home_folder_of_nobody_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "~nobody_such/x: no home folder is known for ~nobody_such. Write the whole path."
    with pytest.raises(ConfigError) as refusal:
        Config(env_id="CartPole-v1", run_dir=Path("~nobody_such/x"))
    assert str(refusal.value) == f"run_dir={text}"
    assert (
        Config(env_id="CartPole-v1", run_dir=home / "~nobody_such" / "x").run_dir
        == home / "~nobody_such" / "x"
    )
    with pytest.raises(ConfigError, match="no home folder is known for ~nobody_such"):
        dppo.load_policy("~nobody_such/x")
    for typed in (
        "eval ~nobody_such/x",
        "plot x --out=~nobody_such/x",
        "train --resume=~nobody_such",
    ):
        assert main(typed.split()) == 2
        assert (
            "no home folder is known for ~nobody_such. Write the whole path."
            in capsys.readouterr().err
        )
    assert not list(Path.cwd().iterdir())


def test_each_flag_and_word_of_all_commands_that_is_a_path_may_begin_with_the_home_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers = list[Parser]()
    init = Parser.__init__

    def remember(self: Parser, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        parsers.append(self)

    monkeypatch.setattr(Parser, "__init__", remember)
    for command in command_modules():
        module = import_module(command_modules()[command])
        if isinstance(getattr(module, "PARSER", None), Parser):
            parsers.append(module.PARSER)
        with suppress(SystemExit):
            main([command, "--help"])
    walked = set[str]()
    for parser in parsers:
        for action in parser._actions:
            if action.metavar in PATHS and action.nargs is None:
                walked.add(f"{parser.prog.split()[-1]} {action.option_strings[0]}")
                flags, _ = parser.split([f"{action.option_strings[0]}=~/x"])
                assert str(flags[action.dest]) == str(home / "x"), (parser.prog, action)
            assert action.metavar not in ("FOLDER", "FOLDER/", "RUN_DIR"), "another word for a path"
        assert parser.split(["~/x", "y"])[1] == [str(home / "x"), "y"]
    outputs = {
        "plot --out",
        "report --out",
        "eval --video",
        "replay --video",
        "compare --out",
        "tune --out",
    }
    sources = {"tune --space", "train --config", "train --resume", "train --branch"}
    assert outputs | sources <= walked


@pytest.mark.parametrize(
    "use",
    [
        lambda: dppo.evaluate("~/none", video="~/out.mp4"),
        lambda: dppo.export_onnx("~/none", "~/out.onnx"),
        lambda: dppo.train(Config(**TRAINING), resume="~/none"),
    ],
)
def test_functions_say_the_path_that_they_looked_for(home: Path, use: Callable[[], object]) -> None:
    with pytest.raises((CheckpointError, ConfigError)) as raised:
        use()
    if "pip install" not in str(raised.value):
        assert f"{home}/none: does not exist" in str(raised.value)
