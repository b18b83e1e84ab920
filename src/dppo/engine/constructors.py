"""Constructors: judges why the constructor of an environment raised."""

from dppo.engine.hosting import Hosting
from dppo.engine.messages import Limits
from dppo.errors import EnvFault, EnvironmentFault
from dppo.ppo.exchange.questions import Question


class Constructors:
    """Judges whether a constructor raised because its process has too many samplers."""

    def __init__(self, hosting: Hosting, limits: Limits) -> None:
        self._hosting = hosting
        self._limits = limits

    def is_crowded(self, question: Question, fault: EnvironmentFault) -> bool:
        """Return whether a constructor may have raised because its process already had too many samplers.

        The limit would be the number of samplers that the process had. It is not the reason if some process has had
        more, or if that limit leaves too few places for all samplers. In an elastic run, a limit means waiting for more
        actors, so a licence that may be busy is tried again first.
        """
        if fault.place is None or not fault.in_constructor:
            return False
        limit = fault.place.samplers_beside
        most_instantiated = self._hosting.most_instantiated
        if limit < max(1, most_instantiated):
            return False
        most_actors = len(self._hosting.actors)
        if self._limits.elastic:
            if not most_instantiated and self._may_be_busy(question, fault.place):
                return False
            most_actors = self._limits.most_actors
        return limit * most_actors >= len(self._hosting.positions)

    def _may_be_busy(self, question: Question, place: EnvFault) -> bool:
        """Return whether a licence or port that was not free is the likelier reason.

        It is not in the first iteration, in a process that has made other environments.
        """
        is_replaced = any(actor.process.number > 1 for actor in self._hosting.actors.values())
        return question.index > 0 or is_replaced or not place.others
