"""`dppo presets`: list the presets, or print one as YAML."""

from itertools import groupby
from textwrap import fill

from dppo.commands.flags import WIDTH, Parser, only_word, shown
from dppo.config.parts import default_of
from dppo.config.presets import Preset, described_presets, preset_named
from dppo.invocation import as_called

PROG = "dppo presets"
COMMENT_WIDTH = 100  # characters of a line of comments in the YAML
DESCRIPTION = (
    "List settings that are tuned for environments. Those with an asterisk apply by default, others with dppo train "
    "ENV_ID --preset NAME. With NAME, which may be an environment, print one as YAML to save and edit."
)


def main(argv: list[str]) -> int:
    """Print all presets, or the settings of one as YAML; return the exit code."""
    _, words = Parser(PROG, "[NAME]", DESCRIPTION).split(argv)
    name = only_word(words, "NAME", PROG)
    if name is not None:
        print(_as_yaml(preset_named(name)))
        return 0
    for family, presets in groupby(described_presets(), lambda preset: preset.family):
        print("", family.replace("_", " "), *map(_as_rows, presets), sep="\n")
    return 0


def _as_rows(preset: Preset) -> str:
    """Return lines with the name of a preset, its settings other than defaults, its source and its score."""
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
        fill(f"    {name:8}  {text}", WIDTH, subsequent_indent=" " * 14)  # 14 = 4 + 8 + 2
        for name, text in facts.items()
    ]
    star = ""
    if preset.about.get("applies") == "by itself":
        star = " *"
    return "\n".join([f"  {preset.name}{star}", *rows])


def _as_yaml(preset: Preset) -> str:
    """Return the settings of a preset as YAML, after comments with its name, source, score and use."""
    import yaml

    facts = {
        "preset": preset.name,
        **preset.about,
        "use": as_called("dppo train ENV_ID --preset none --config FILE, with these lines"),
    }
    comments = [
        fill(f"# {name}: {text}", COMMENT_WIDTH, subsequent_indent="#   ")
        for name, text in facts.items()
    ]
    settings = yaml.safe_dump(preset.settings, sort_keys=False).rstrip()
    return "\n".join([*comments, settings])
