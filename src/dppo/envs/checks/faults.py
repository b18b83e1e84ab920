"""Faults of environments: in constructors, tracebacks of the user's code alone, and Gymnasium's checker."""

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dppo.errors import DppoError, EnvFault, EnvironmentFault
from dppo.process_state.borders import user_code
from dppo.signals import INTERRUPTIONS
from dppo.user_code import in_a_line, in_unicode, place_of

REMEDY = "Correct the environment, or use `on_env_fault=rebuild` to go on with a new episode of a new environment."
PACKAGE = str(Path(__file__).parents[2])
# warnings about bounds, which may have any size here
IRRELEVANT = re.compile("A Box .* is (-)?infinity|For Box action spaces")


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, starting at the first frame outside this package.

    The fault whose repair has raised `error` is left out.
    """
    chain = [error]
    for raised in chain:
        if isinstance(raised.__context__, DppoError):
            raised.__context__ = None
        earlier = (raised.__cause__, raised.__context__)
        chain += [cause for cause in earlier if cause is not None and cause not in chain]
    frames = error.__traceback__
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_code.co_filename.startswith(PACKAGE)
    ):
        frames = frames.tb_next
    return in_unicode("".join(traceback.format_exception(type(error), error, frames)))


class WrapperRaised(Exception):
    """A wrapper raised the cause of this exception. The message names the wrapper."""


@contextmanager
def making(owner: str, sampler_id: int = 0, env: int = 0, *, env_name: str = "") -> Iterator[None]:
    """Raise an EnvironmentFault in place of what the constructor of an environment raises, unless it is one of ours.

    `env_name`: names the constructor in a note on state of the process that it changes; default: `owner`.
    """
    try:
        with user_code(f"the constructor of {env_name or owner}"):
            yield
    except (DppoError, *INTERRUPTIONS):
        raise
    except BaseException as error:
        raised = error
        maker = "the environment's constructor"
        if isinstance(error, WrapperRaised) and error.__cause__ is not None:
            raised = error.__cause__
            maker = str(error)
        message = f"{owner}: {maker} raised {in_a_line(raised)}{place_of(raised)}"
        trace = user_traceback(raised)
        place = EnvFault("constructor", type(raised).__name__, trace, env, sampler_id=sampler_id)
        raise EnvironmentFault(message, trace, place) from None


def gymnasium_warnings(env: Any) -> list[str]:
    """Return the warnings of Gymnasium's own checker, and the assertion that failed, if one did."""
    from gymnasium.utils.env_checker import check_env

    failures = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(getattr(env, "unwrapped", env), skip_render_check=True, skip_close_check=True)
        except Exception as error:  # an environment may raise anything
            failures.append(in_a_line(error))
    texts = [re.sub(r"\x1b\[\d+m|WARN: ", "", str(warning.message)) for warning in caught]
    return [
        " ".join(text.split())
        for text in dict.fromkeys(texts + failures)
        if not IRRELEVANT.search(text)
    ]
