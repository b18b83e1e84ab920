"""`dppo presets`: list the presets, or print one as YAML."""

from itertools import groupby
from textwrap import fill

from dppo.commands.flags import WIDTH, Parser, one_word, shown
from dppo.config.parts import default_of
from dppo.config.presets import Preset, described_presets, preset_named
from dppo.invocation import as_called

PROG = "dppo presets"
DESCRIPTION = (
    "List settings that are tuned for environments: with an asterisk those that apply by themselves, others apply with "
    "dppo train ENV_ID --preset NAME. With NAME, which may be an environment, print one as YAML to save and edit."
)


def main(argv: list[str]) -> int:
    """Print all presets, or one; return the exit code."""
    _, words = Parser(PROG, "[NAME]", DESCRIPTION).split(argv)
    name = one_word(words, "NAME", PROG)
    if name is not None:
        print(_as_yaml(preset_named(name)))
        return 0
    for family, presets in groupby(described_presets(), lambda preset: preset.family):
        print("", family.replace("_", " "), *map(_as_rows, presets), sep="\n")
    return 0


def _as_rows(preset: Preset) -> str:
    """Return the name of a preset, settings other than the defaults, the source and the score, one below the other."""
    settings = [
        f"{name} {shown(value)}"
        for name, value in preset.settings.items()
        if value != default_of(name)
    ]
    facts = {
        "settings": ", ".join(settings) or "defaults",
        "source": preset.about["source"],
        "score": preset.about["here"],
    }
    rows = [
        fill(f"    {fact:8}  {text}", WIDTH, subsequent_indent=" " * 14)
        for fact, text in facts.items()
    ]
    star = " *" if preset.about.get("applies") == "by itself" else ""
    return "\n".join([f"  {preset.name}{star}", *rows])


def _as_yaml(preset: Preset) -> str:
    """Return the settings of a preset, below comments with its source and its score."""
    import yaml

    facts = {
        "preset": preset.name,
        **preset.about,
        "use": as_called("dppo train ENV_ID --preset none --config FILE, with these lines"),
    }
    comments = [
        fill(f"# {name}: {text}", 100, subsequent_indent="#   ") for name, text in facts.items()
    ]
    return "\n".join([*comments, yaml.safe_dump(preset.settings, sort_keys=False).rstrip()])
