"""Heat and cool a small office in EnergyPlus: pip install pyenergyplus-lbnl; dppo train energyplus:make.

EnergyPlus owns the loop and calls back, so it runs in a thread, as in ../callback_simulator.py. An episode is three
days that begin on a day of the year that its seed chooses; a step is an hour. Each episode is a run of EnergyPlus of
its own, which sizes the plant first: a reset takes as long as many steps.
"""

import datetime
import queue
import re
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

ZONES = ["Core_ZN", *(f"Perimeter_ZN_{number}" for number in range(1, 5))]
DAYS, TIMEOUT_S = 3, 300.0
COMFORT = 20.0, 26.0  # degrees Celsius, in the hours of work


class SmallOffice(gym.Env[np.ndarray, np.ndarray]):
    """The reference building of the U.S. Department of Energy, in Chicago.

    Observation [9]: temperatures outside and in five zones, sine and cosine of the hour, whether people are at work.
    Action [2]: heating setpoint from 14 to 22, and how far the cooling setpoint is above it, from 1 to 10.
    Reward: minus the energy of the HVAC in units of 10 kWh, minus the degrees outside of the comfort range.
    """

    def __init__(self, scratch_dir: str) -> None:
        """Keep the files of EnergyPlus in `scratch_dir`."""
        low, high = (
            np.array([-50.0] * 6 + [-1, -1, 0], np.float32),
            np.array([100.0] * 6 + [1, 1, 1], np.float32),
        )
        self.observation_space = gym.spaces.Box(low, high)
        self.action_space = gym.spaces.Box(
            np.array([14, 1], np.float32), np.array([22, 10], np.float32)
        )
        self._folder, self._thread = Path(scratch_dir), None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        first = datetime.date(2009, 1, 1) + datetime.timedelta(
            days=int(self.np_random.integers(365 - DAYS))
        )
        self._states: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._simulate, args=(first,), daemon=True)
        self._thread.start()
        return self._next()[0], {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._actions.put((float(action[0]), float(action[0] + action[1])))
        obs, energy, over = self._next()
        at_work, inside = obs[8], obs[1:6]
        cold, hot = (
            np.maximum(COMFORT[0] - inside, 0).mean(),
            np.maximum(inside - COMFORT[1], 0).mean(),
        )
        return obs, -energy / 10 - float(at_work * (cold + hot)), False, over, {}

    def close(self) -> None:
        """End the run of EnergyPlus."""
        if self._thread is not None:
            self._actions.put(None)
            self._thread.join(TIMEOUT_S)
            self._thread = None

    def _next(self) -> Any:
        answer = self._states.get(timeout=TIMEOUT_S)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    # ------------------------------------------------------------------ in the thread

    def _simulate(self, first: datetime.date) -> None:
        try:
            self._run(first)
        except BaseException as error:  # raised again where it is waited for
            self._states.put(error)

    def _run(self, first: datetime.date) -> None:
        from pyenergyplus.api import EnergyPlusAPI
        from pyenergyplus.dataset import ref_models, weather_files

        api = EnergyPlusAPI()
        state, exchange = api.state_manager.new_state(), api.exchange
        api.runtime.set_console_output_status(state, False)
        names = [
            ("Site Outdoor Air Drybulb Temperature", "Environment"),
            *(("Zone Mean Air Temperature", z) for z in ZONES),
        ]
        for name in names:
            exchange.request_variable(state, *name)
        told = {"hours": 0, "energy": 0.0, "over": False}

        def each_timestep(state: Any) -> None:
            # 3: the run period
            if exchange.warmup_flag(state) or exchange.kind_of_sim(state) != 3 or told["over"]:
                return
            meters = [
                exchange.get_meter_handle(state, f"{kind}:HVAC")
                for kind in ("Electricity", "NaturalGas")
            ]
            told["energy"] += (
                sum(exchange.get_meter_value(state, meter) for meter in meters if meter >= 0)
                / 3.6e6
            )
            if exchange.zone_time_step_number(state) != 1:
                return
            # Sunday is 1
            hour, day = (exchange.current_time(state) % 24, exchange.day_of_week(state))
            turn, work = 2 * np.pi * hour / 24, 2 <= day <= 6 and 8 <= hour < 18
            seen = [
                exchange.get_variable_value(state, exchange.get_variable_handle(state, *name))
                for name in names
            ]
            over = told["hours"] == 24 * DAYS - 1
            self._states.put(
                (
                    np.array([*seen, np.sin(turn), np.cos(turn), work], np.float32),
                    told["energy"],
                    over,
                )
            )
            action = None if over else self._actions.get()
            told.update(hours=told["hours"] + 1, energy=0.0, over=action is None)
            if action is None:
                api.runtime.stop_simulation(state)
                return
            for schedule, value in zip(("HTGSETP_SCH", "CLGSETP_SCH"), action, strict=True):
                handle = exchange.get_actuator_handle(
                    state, "Schedule:Compact", "Schedule Value", schedule
                )
                exchange.set_actuator_value(state, handle, value)

        api.runtime.callback_begin_zone_timestep_after_init_heat_balance(state, each_timestep)
        model = self._folder / "office.idf"
        model.write_text(
            dated(Path(ref_models["small_office"]).read_text("utf8", "replace"), first), "utf8"
        )
        code = api.runtime.run_energyplus(
            state, ["-w", weather_files["usa_il_chicago"], "-d", str(self._folder), str(model)]
        )
        api.state_manager.delete_state(state)
        if not told["over"]:
            raise RuntimeError(
                f"EnergyPlus ended with code {code}: {(self._folder / 'eplusout.err').read_text()[-2000:]}"
            )


def dated(model: str, first: datetime.date) -> str:
    """Return a model that is run with the weather of `DAYS` days from `first`, and not with that of design days."""
    last = first + datetime.timedelta(days=DAYS)
    period = f"RunPeriod,Days,{first.month},{first.day},,{last.month},{last.day},,Sunday,No,No,No,Yes,Yes;"
    model = re.sub(r"RunPeriod,[^;]*;", period, model, count=1)
    return re.sub(
        r"SimulationControl,[^;]*;", "SimulationControl,Yes,Yes,Yes,No,Yes;", model, count=1
    )


def make(scratch_dir: str) -> SmallOffice:
    """Return the environment; `scratch_dir` is a folder of its own, which dppo gives to each."""
    return SmallOffice(scratch_dir)
