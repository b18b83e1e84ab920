"""Solvers that own their time loop: `dppo train dppo.remote:make` with dppo.h, its Fortran module or the Python client.

`python -m dppo.remote` prints the folder of dppo.h and dppo_module.f90, for a compiler's -I.
"""

from dppo.remote.environment import SolverEnv, make

__all__ = ["SolverEnv", "make"]
