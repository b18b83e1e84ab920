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
    if name := one_word(words, "NAME", PROG):
        print(_as_yaml(preset_named(name)))
    else:
        for family, presets in groupby(described_presets(), lambda one: one.family):
            print("", family.replace("_", " "), *map(_as_row, presets), sep="\n")
    return 0


def _as_row(one: Preset) -> str:
    """Return the name of a preset, what differs from the defaults, the source and the score, one below the other."""
    differs = [f"{name} {shown(value)}" for name, value in one.settings.items() if value != default_of(name)]
    facts = {"settings": ", ".join(differs) or "defaults", "source": one.about["source"], "score": one.about["here"]}
    rows = [fill(f"    {fact:8}  {text}", WIDTH, subsequent_indent=" " * 14) for fact, text in facts.items()]
    return "\n".join([f"  {one.name}{' *' * (one.about.get('applies') == 'by itself')}", *rows])


def _as_yaml(one: Preset) -> str:
    """Return the settings of a preset, below what is known of it as comments."""
    import yaml

    facts = {
        "preset": one.name,
        **one.about,
        "use": as_called("dppo train ENV_ID --preset none --config FILE, with these lines"),
    }
    comments = [fill(f"# {name}: {text}", 100, subsequent_indent="#   ") for name, text in facts.items()]
    return "\n".join([*comments, yaml.safe_dump(one.settings, sort_keys=False).rstrip()])
