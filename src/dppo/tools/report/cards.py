"""The cards at the top of a report: state, env steps, returns, the policy that is deployed, speed."""

import math

from dppo.records.differences import Difference
from dppo.records.metrics.reading import missing_steps
from dppo.records.terminal.figures import duration, number, signed
from dppo.tools.curves import EVALUATED_RETURN, RETURN, training_times
from dppo.tools.report.facts import Facts


def cards(facts: Facts) -> dict[str, str]:
    """List the value of each card by its name."""
    row = facts.last_row
    config = facts.config
    seconds = [math.nan, *training_times(facts.rows)][-1]
    counted = sum(count for key, count in row.items() if key.startswith("incidents/"))
    incidents = max(counted, len(facts.incidents))  # no row counts the one that ended the run
    waited_s = row.get("time/eval_wait_s", 0.0)
    waits = {"waiting for evaluations": duration(waited_s)} if waited_s >= 1 else {}
    actors = "in process"
    if config.num_actors:
        actors = number(row.get("actors/alive"), 0)
    total = config.total_steps - missing_steps(row, config.batch_size)
    return {
        "state": facts.state,
        "env steps": f"{row.get('global_step', 0):,.0f} of {total:,}",
        "episodes": number(row.get("charts/episodes"), 0),
        **_training_returns(facts),
        **_evaluations(facts),
        "training time": duration(float(seconds)),
        **waits,
        "steps/s": number(row.get("charts/SPS")),
        "actors": actors,
        "incidents": f"{incidents:,.0f}",
    }


def _training_returns(facts: Facts) -> dict[str, str]:
    row = facts.last_row
    collected = facts.config.collected_by_prior
    policy_rows = (row for row in facts.rows if row.get("iteration", 0) > collected)
    returns = [row.get(RETURN, math.nan) for row in policy_rows]
    best_return = max(filter(math.isfinite, returns), default=math.nan)
    recent = row.get("charts/recent_episodes", 0)
    name = "training return"
    if recent > 1:
        name += f", last {recent:.0f}"
    return {name: number(row.get(RETURN)), "best training return": number(best_return)}


def _evaluations(facts: Facts) -> dict[str, str]:
    """Return the last and the best evaluation, the comparison with the controller, and the policy that is deployed."""
    cards = {}
    evaluations = [row for row in facts.rows if math.isfinite(row.get(EVALUATED_RETURN, math.nan))]
    if evaluations:
        last = evaluations[-1]
        results = [
            (row[EVALUATED_RETURN], row.get("eval/global_step", math.nan)) for row in evaluations
        ]
        cards["last evaluation"] = _result(*results[-1])
        if facts.best is not None:  # `rows` may be a sample without it
            score, iteration = facts.best
            results.append((score, facts.step_of(iteration)))
        cards["best evaluation"] = _result(*max(results, key=lambda result: result[0]))
        if "eval/baseline_return" in last:
            cards["baseline"] = number(last["eval/baseline_return"])
        difference = Difference.from_row(last)
        if difference is not None:
            text = f"{signed(difference.mean)}, {difference.verdict}"
            cards["difference"] = text
    if facts.deploys_baseline:
        cards["deployed"] = "baseline"
    elif facts.deployed is not None:
        cards["deployed"] = f"policy, step {facts.step_of(facts.deployed):,.0f}"
    return cards


def _result(mean_return: float, step: float) -> str:
    return f"{number(mean_return)}, step {step:,.0f}"
