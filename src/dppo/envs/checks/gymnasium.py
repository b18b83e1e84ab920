"""Ask Gymnasium's own checker about an environment."""

import re
import warnings
from typing import Any

from gymnasium.utils.env_checker import check_env

from dppo.user_code import in_a_line

NO_MATTER = re.compile("A Box .* is (-)?infinity|For Box action spaces")  # bounds of any size are fine here


def gymnasium_says(env: Any) -> list[str]:
    """Return the warnings of the checker, and the assertion that failed, if one did."""
    failed = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            check_env(getattr(env, "unwrapped", env), skip_render_check=True, skip_close_check=True)
        except Exception as error:  # an environment may raise anything
            failed = [in_a_line(error)]
    texts = [re.sub(r"\x1b\[\d+m|WARN: ", "", str(one.message)) for one in found]
    return [" ".join(one.split()) for one in dict.fromkeys(texts + failed) if not NO_MATTER.search(one)]
