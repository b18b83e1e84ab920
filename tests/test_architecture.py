"""The import rules of docs/ARCHITECTURE.md, read from the source itself."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import SRC, trees

import dppo

# every module may import these
BASE = (
    "attempts errors files invocation log machine numerics plain_data plugins process_state slots.layout spaces "
    "streams user_code"
)
# The packages and modules of dppo that each package or module may import beside BASE and itself.
MAY_IMPORT = {
    "attempts": "",
    "errors": "",
    "files": "",
    "invocation": "",
    "log": "",
    "machine": "",
    "numerics": "",
    "plain_data": "",
    "plugins": "",
    "process_state": "",
    "slots": "",
    "spaces": "",
    "streams": "",
    "user_code": "",
    "signals": "",
    "remote": "slots",
    "config": "",
    "ppo": "config.parts",
    "sac": "ppo",
    "envs": "config.parts ppo.exchange.records signals slots",
    "records": "config ppo.exchange.records",
    "hosts": "config ppo sac envs policies.controller signals",
    "engine": "ppo envs signals",
    "transports": "config ppo envs hosts engine signals slots",
    "learners": "config ppo sac hosts engine.restarts transports.ray",
    "policies": "ppo records envs.checks",
    "policies.policy": "config.aliases config.arguments config.groups ppo records.comparison envs.checks",
    "policies.loading": "config.trust ppo records",
    "policies.deployed": "config records",
    "policies.acting": "envs ppo",
    "policies.controller": "envs.checks signals",
    "policies.controller_acting": "envs ppo.exchange.records",
    "policies.player": "config envs ppo.exchange.records ppo.networks.network records",
    "policies.arguments": "ppo.exchange.records records",
    "policies.on_actors": "engine transports.ray config.parts envs ppo.exchange.records",
    "policies.evaluation": "config envs ppo.exchange.records ppo.networks.network records signals",
    "policies.playing": "config.parts envs ppo signals",
    "run": "config ppo engine hosts learners transports policies records signals",
    "run.evaluations": "config engine envs ppo transports policies records signals",
    "run.in_process_players": "engine envs policies ppo.exchange.records",
    "run.factory": "config ppo engine envs.state_files hosts learners transports policies records signals",
    "run.needed_states": "config envs.state_files records",
    "run.file_observers": "config envs.names records",
    "run.iteration_row": "engine.collector ppo.exchange.records",
    "run.learner": "config ppo engine learners signals",
    "run.outputs": "config ppo envs policies records",
    "run.runner": "config ppo envs engine hosts transports policies records signals",
    "commands": "config envs transports.ray policies records run signals",
    "tools": "commands config engine envs hosts learners policies ppo records run signals slots.program transports",
    "__init__": "config tools.export policies ppo.kernels.recurrence records run",
    "__main__": "__init__ commands signals",
}


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module by its name within the package, such as "ppo.agent"."""
    by_name = {}
    for path, tree in trees().items():
        parts = Path(path).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        by_name[name] = tree
    return by_name


def imports(tree: ast.AST, *, at_import: bool = False) -> Iterator[str]:
    """Yield the full names that a module imports: anywhere, or only those imported along with it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_import and runs_later(node)):
            yield from imports(node, at_import=at_import)


def runs_later(node: ast.AST) -> bool:
    """Return whether the body of `node` does not run while its module is imported."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def ours(tree: ast.Module, *, at_import: bool = False) -> set[str]:
    """Return the modules of dppo that a module imports, by their names within the package."""
    names = set()
    for name in imports(tree, at_import=at_import):
        package, _, name_within = name.partition(".")
        if package == "dppo":
            names.add(
                next(
                    (m for m in (name_within, name_within.rpartition(".")[0]) if m in modules()),
                    "__init__",
                )
            )
    return names


def theirs(tree: ast.Module, *, at_import: bool = False) -> set[str]:
    """Return the libraries that a module imports."""
    return {name.partition(".")[0] for name in imports(tree, at_import=at_import)} - {"dppo"}


def room(module: str) -> str:
    return module.partition(".")[0]


def prefixes(module: str) -> list[str]:
    """Return "a.b.c", "a.b" and "a" for "a.b.c"."""
    parts = module.split(".")
    return [".".join(parts[:size]) for size in range(len(parts), 0, -1)]


def test_imports_run_one_way() -> None:
    for module, tree in modules().items():
        here = next((prefix for prefix in prefixes(module) if prefix in MAY_IMPORT), None)
        assert here is not None, f"{module} is in a new room: add it to MAY_IMPORT"
        allowed = {*f"{MAY_IMPORT[here]} {BASE} {room(module)}".split()}
        assert {name for name in ours(tree) if not set(prefixes(name)) & allowed} == set(), module


def test_each_library_stays_in_its_rooms() -> None:
    homes = {
        "ray": "transports.ray learners",
        "torch": "ppo numerics hosts.trainer_builder hosts.trainer sac learners tools.export run.building",
        "gymnasium": "envs remote",
        "pydantic": "config",
        "argparse": "commands tools",
        "rich": "records commands tools",
        "matplotlib": "tools",
        "tensorboardX": "records",
        "wandb": "tools.trackers",
        "mlflow": "tools.trackers",
        "safetensors": "records",
        "filelock": "records files",
        "av": "tools",
    }
    for module, tree in modules().items():
        for library in theirs(tree) & set(homes):
            allowed = homes[library].split()
            assert set(prefixes(module)) & set(allowed), f"dppo.{module} imports {library}"


def test_acting_imports_no_torch_and_learning_no_environment() -> None:
    graph = {name: ours(tree, at_import=True) for name, tree in modules().items()}
    acting, learning = (
        {name} | reachable(graph, name) for name in ("ppo.acting.sampler", "ppo.learning.trainer")
    )
    assert "ppo.learning.trainer" not in acting
    assert not any("torch" in theirs(modules()[module], at_import=True) for module in acting)
    assert not {"ppo.acting.sampler", "ppo.acting.agent"} & learning


def reachable(graph: dict[str, set[str]], module: str) -> set[str]:
    """Return all modules that are imported along with `module`; this one only if there is a circle."""
    reached = set[str]()
    todo = [module]
    while todo:
        new = graph[todo.pop()] - reached
        reached |= new
        todo += new
    return reached


def test_algorithm_uses_no_files_terminal_or_clock() -> None:
    outside = "os sys io pathlib time logging random json pickle threading subprocess"
    for name, tree in modules().items():
        if room(name) in ("ppo", "sac"):
            assert not theirs(tree) & set(outside.split()), name
            calls = [
                ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)
            ]
            assert not {"print", "open", "input"} & set(calls), name


def test_imports_form_no_circle() -> None:
    """Imports in functions, and those for type checkers only, count as well."""
    graph = {name: ours(tree) - {name} for name, tree in modules().items()}
    assert [name for name in graph if name in reachable(graph, name)] == []


CALLS_OF_RAY = "init shutdown get put wait kill get_actor nodes cluster_resources"
ACTS_OF_RAY = "_get_local_state get_draining_nodes node_table"
FUNCTIONS_OF_RAY = (
    "placement_group remove_placement_group available_resources_per_node _internal_kv_get "
    "get_cluster_status"
)


def asks_ray(call: ast.Call) -> bool:
    """Return whether a call waits for Ray: `ray.get(...)`, `handle.method.remote(...)`, `placement_group(...)`."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in FUNCTIONS_OF_RAY.split()
    if not isinstance(function, ast.Attribute):
        return False
    if ast.unparse(function.value) == "ray":  # `ray.remote` makes a class
        return function.attr in f"{CALLS_OF_RAY} {ACTS_OF_RAY}".split()
    return function.attr in f"remote {ACTS_OF_RAY}".split()


def passes_on_ray(call: ast.Call) -> bool:
    """Return whether a call hands over a function of Ray: `partial(ray.kill, handle)`."""
    return any(
        isinstance(word, ast.Attribute) and ast.unparse(word.value) == "ray" for word in call.args
    )


def unmarked_calls_of_ray(tree: ast.AST, *, marked: bool = False) -> Iterator[str]:
    """Yield the calls into Ray in functions that are not marked as made by a thread of their own."""
    for node in ast.iter_child_nodes(tree):
        inside = marked
        if isinstance(node, ast.FunctionDef):
            inside = marked or "calls_ray" in [
                ast.unparse(decorator) for decorator in node.decorator_list
            ]
        if isinstance(node, ast.Call) and not marked and (asks_ray(node) or passes_on_ray(node)):
            yield ast.unparse(node)
        yield from unmarked_calls_of_ray(node, marked=inside)


def test_no_call_into_ray_is_made_by_the_thread_of_the_loop() -> None:
    """Such a call may wait for minutes. `calls_ray` marks functions that run in the threads of `RayCalls`."""
    unmarked = {name: list(unmarked_calls_of_ray(tree)) for name, tree in modules().items()}
    assert {name: calls for name, calls in unmarked.items() if calls} == {}


def test_a_queue_that_is_waited_for_with_a_time_limit_is_no_simple_queue() -> None:
    """CPython's `SimpleQueue.get` may wait forever, and `Queue.get` keeps its lock where a signal handler raises."""
    waiting = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "get(timeout=" in ast.unparse(node)
    }
    assert waiting == {"hosts.keeper"}  # whose process handles no signals
    assert "SimpleQueue" not in ast.unparse(modules()["hosts.keeper"])


def test_a_function_fits_a_screen_and_a_module_has_one_job() -> None:
    """Lines are no budget: a limit of 300 for a file was met by packing them. Twice the usual length is two jobs."""
    files = {
        str(path.relative_to(SRC)): len(path.read_text("utf8").splitlines())
        for path in SRC.rglob("*.py")
    }
    assert {name: lines for name, lines in files.items() if lines > 450} == {}

    functions = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: lines for name, lines in functions.items() if lines > 60} == {}


def test_a_checkpoint_is_never_unpickled() -> None:
    users = {
        name
        for name, tree in modules().items()
        if theirs(tree) & {"pickle", "cloudpickle", "dill", "shelve"}
    }
    # it unpickles only messages from processes of the same run
    assert users <= {"transports.ray.pickling"}


def test_public_names_of_the_package_exist_and_are_documented() -> None:
    assert sorted(dppo.__all__) == list(dppo.__all__)
    for name in dppo.__all__:
        assert getattr(dppo, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dppo.nonsense


# torch imports sympy and its compiler for some of what can be had without.
NETWORK = """
import dppo.run.runner, dppo.run.learner, dppo.learners.trainers, dppo.transports.in_process
import torch
from dppo.ppo.networks.mlp import MLP
with dppo.learners.trainers.torch_as_usual():
    MLP([4, 8], "tanh", 2, 0, torch.Generator())
"""
# Statements, and the libraries that they must not load. One process forks a child for each, so that Python starts once.
NOT_LOADED = {
    "import dppo, dppo.__main__": "torch ray pydantic numpy gymnasium yaml matplotlib rich",
    "import dppo.transports.ray.actor": "torch ray pydantic yaml matplotlib rich jaxtyping",
    "import dppo; dppo.Config(env_id='CartPole-v1')": "torch ray gymnasium",
    "import dppo; dppo.load_policy": "torch ray",
    NETWORK: "ray sympy",
}
LOADED_BY = """
import json, os, sys
for statement in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(statement)
        print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""


def test_libraries_are_loaded_where_they_are_needed_only() -> None:
    """The command line, an actor, settings, a policy, and training in one process."""
    statements = json.dumps(list(NOT_LOADED))
    command = [sys.executable, "-c", LOADED_BY, statements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    loaded = {}
    for statement, line in zip(NOT_LOADED, done.stdout.splitlines(), strict=True):
        loaded[statement] = set(json.loads(line))
        heavy = NOT_LOADED[statement].split()
        assert loaded[statement].isdisjoint(heavy), statement
    assert loaded["import dppo.transports.ray.actor"] >= {"numpy", "gymnasium"}
