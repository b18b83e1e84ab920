"""Definitions of a program, `__main__:name`, and the name by which its file is imported: `mine:name` of mine.py."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dppo.config.field import FlatSettings
from dppo.config.trust import NAMING, code_named_by
from dppo.errors import ConfigError, printable
from dppo.invocation import command, flag, typed_words

MAIN = "__main__:"


def imported_name(named: Any, program: str | None) -> Any:
    """Return `mine:name` for `__main__:name` of the program mine.py, also in a list; other names are unchanged."""
    if isinstance(named, list | tuple):
        return [imported_name(name, program) for name in named]
    if program is None or not isinstance(named, str) or not named.startswith(MAIN):
        return named
    return f"{Path(program).stem}:{named.removeprefix(MAIN)}"


def named_as_now(
    before: FlatSettings, program_before: str | None, now: FlatSettings, program_now: str | None
) -> dict[str, Any]:
    """Return the flat settings `before`, with the names in `now` for definitions in the same file.

    A definition has one name in the program that it is a part of, and another for a command that imports the file.
    """
    renamed = dict(before)
    for setting in NAMING.keys() & before.keys() & now.keys():
        same = imported_name(before[setting], program_before)
        if same == imported_name(now[setting], program_now):
            renamed[setting] = now[setting]
    return renamed


def definitions_of_program(settings: FlatSettings, passed: Collection[str]) -> dict[str, list[str]]:
    """Return the names of definitions of a program in flat settings, by setting, without those that were `passed`."""
    definitions = {}
    for setting in sorted(NAMING.keys() - set(passed)):
        value = settings.get(setting)
        names = value if isinstance(value, list | tuple) else [value]
        of_program = [str(name) for name in names if str(name).startswith(MAIN)]
        if of_program and not any("<" in name for name in of_program):
            definitions[setting] = of_program
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
        after = []
        if "model" in definitions:
            after = ["--model", *imported_name(definitions["model"], str(path))]
        return ConfigError(
            f"{run}: {fact} {path}, which is another program. Leave out the episodes of the model card: "
            f"{command(*typed, *after, '--episodes', 0)}."
        )
    before = [words[0]]
    after = list(words[1:])
    for setting, names in definitions.items():
        imported = imported_name(names, str(path))
        if setting == "env_id" and words[0] == "train":
            before += imported
        else:
            after += [flag(setting), *imported]
    if code_named_by(settings).keys() - definitions.keys():
        after.append("--trust")
    return ConfigError(
        f"{run}: {fact} {path}, which is another program. In the folder {path.parent}: "
        f"{command(*before, *after)}. That imports the file, so it must train only below "
        f"`if __name__ == '__main__':`."
    )


def _call(run: Path, definitions: Mapping[str, list[str]], path: Path) -> str:
    """Return the call with which another program than `path` plays a run with its definitions."""
    names = {
        setting.removesuffix("_id"): several[0].removeprefix(MAIN)
        for setting, several in definitions.items()
    }
    imports = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names.values()))
    arguments = "".join(f", {argument}={name}" for argument, name in names.items())
    return (
        f"Pass what its file defines: from {path.stem} import {imports}; dppo.evaluate({str(run)!r}{arguments}). That "
        f"imports the file, from the folder {path.parent}, so it must train only below `if __name__ == '__main__':`."
    )
