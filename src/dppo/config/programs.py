"""Definitions of a program, `__main__:name`, and the name by which its file is imported: `mine:name` of mine.py."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dppo.config.field import FlatSettings
from dppo.config.trust import NAMING, code_named_by
from dppo.errors import ConfigError, printable
from dppo.invocation import command, flag, typed_words

MAIN = "__main__:"


def imported_name(code: Any, program: str | None) -> Any:
    """Return `mine:name` for `__main__:name` of the program mine.py, also in a list; other names are unchanged."""
    if isinstance(code, list | tuple):
        return [imported_name(name, program) for name in code]
    if program is None or not isinstance(code, str) or not code.startswith(MAIN):
        return code
    return f"{Path(program).stem}:{code.removeprefix(MAIN)}"


def named_as_now(
    stored_settings: FlatSettings,
    stored_program: str | None,
    settings: FlatSettings,
    program: str | None,
) -> dict[str, Any]:
    """Return the flat `stored_settings`, with the names in `settings` for definitions in the same file.

    A definition has one name in the program that it is a part of, and another for a command that imports the file.
    """
    renamed = dict(stored_settings)
    for setting in NAMING.keys() & stored_settings.keys() & settings.keys():
        name = imported_name(stored_settings[setting], stored_program)
        if name == imported_name(settings[setting], program):
            renamed[setting] = settings[setting]
    return renamed


def definitions_of_program(
    settings: FlatSettings, user_settings: Collection[str]
) -> dict[str, list[str]]:
    """Return the names of definitions of a program in flat settings, by setting, without `user_settings`."""
    definitions = {}
    for setting in sorted(NAMING.keys() - set(user_settings)):
        value = settings.get(setting)
        names = value if isinstance(value, list | tuple) else [value]
        program_names = [str(name) for name in names if str(name).startswith(MAIN)]
        if program_names and not any("<" in name for name in program_names):
            definitions[setting] = program_names
    return definitions


def refusal(
    run: Path,
    settings: FlatSettings,
    definitions: Mapping[str, list[str]],
    program: object,
    words: Sequence[str],
) -> ConfigError:
    """Return a ConfigError where the `definitions` of a program, in the settings of a run, cannot be imported.

    Args:
        program: the path of the program, as a checkpoint has it; it may be anything.
        words: of the command, to which the message adds the names in the file of the program. Within a program, the
            message names a call of Python instead.
    """
    defined = [name.removeprefix(MAIN) for names in definitions.values() for name in names]
    fact = f"{' and '.join(defined)} {'was' if len(defined) == 1 else 'were'} defined in"
    if program is None:
        return ConfigError(
            f"{run}: {fact} a notebook or another session of Python, which no command can import. "
            f"Pass it in Python: dppo.train(config, resume=...) or dppo.evaluate(run, env=...)."
        )
    path = Path(printable(str(program)))
    typed = typed_words()
    if typed is None:
        return ConfigError(
            f"{run}: {fact} {path}, which is another program. {_call(run, definitions, path)}"
        )
    if typed[0] == "export":
        words_after = []
        if "model" in definitions:
            words_after = ["--model", *imported_name(definitions["model"], str(path))]
        return ConfigError(
            f"{run}: {fact} {path}, which is another program. Leave out the episodes of the model card: "
            f"{command(*typed, *words_after, '--episodes', 0)}."
        )
    words_before = [words[0]]
    words_after = list(words[1:])
    for setting, names in definitions.items():
        imported = imported_name(names, str(path))
        if setting == "env_id" and words[0] == "train":
            words_before += imported
        else:
            words_after += [flag(setting), *imported]
    if code_named_by(settings).keys() - definitions.keys():
        words_after.append("--trust")
    return ConfigError(
        f"{run}: {fact} {path}, which is another program. In the folder {path.parent}: "
        f"{command(*words_before, *words_after)}. That imports the file, so it must train only below "
        f"`if __name__ == '__main__':`."
    )


def _call(run: Path, definitions: Mapping[str, list[str]], path: Path) -> str:
    """Return the call with which another program than `path` plays a run with its definitions."""
    names = {
        setting.removesuffix("_id"): defined[0].removeprefix(MAIN)
        for setting, defined in definitions.items()
    }
    imports = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names.values()))
    arguments = "".join(f", {argument}={name}" for argument, name in names.items())
    return (
        f"Pass what its file defines: from {path.stem} import {imports}; dppo.evaluate({str(run)!r}{arguments}). That "
        f"imports the file, from the folder {path.parent}, so it must train only below `if __name__ == '__main__':`."
    )
