"""A tank as an FMU: pip install pythonfmu; pythonfmu build -f tank_slave.py gives Tank.fmu, for fmu.py."""

from pythonfmu import Fmi2Causality, Fmi2Slave, Fmi2Variability, Real


class Tank(Fmi2Slave):
    """A heated tank, whose cold inflow rises and falls."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.heating, self.inflow, self.temperature, self.level = 0.0, 1.0, 20.0, 1.0
        self.register_variable(Real("heating", causality=Fmi2Causality.input))
        self.register_variable(
            Real("inflow", causality=Fmi2Causality.parameter, variability=Fmi2Variability.tunable)
        )
        self.register_variable(Real("temperature", causality=Fmi2Causality.output))
        self.register_variable(Real("level", causality=Fmi2Causality.output))

    def do_step(self, current_time: float, step_size: float) -> bool:
        wave = 1 + 0.5 * (current_time // 1800 % 2)  # the flow changes each half hour
        self.level += 1e-4 * step_size * (self.inflow * wave - self.level)
        cold = 1e-3 * self.inflow * wave * (10.0 - self.temperature)
        self.temperature += step_size * (cold + 0.1 * self.heating / max(0.1, self.level))
        return True
