"""Play with a policy of `dppo export`, without dppo: python onnx_policy.py policy.onnx CartPole-v1 [EPISODES]."""

import json
import sys

import gymnasium as gym
import numpy as np
import onnxruntime

if __name__ == "__main__":
    session = onnxruntime.InferenceSession(sys.argv[1])
    # {"obs": ["float32", [4]]}
    inputs = json.loads(session.get_modelmeta().custom_metadata_map["inputs"])
    outputs = [output.name for output in session.get_outputs()]
    env = gym.make(sys.argv[2])
    for episode in range(int(sys.argv[3]) if len(sys.argv) > 3 else 3):
        obs, info = env.reset(seed=episode)
        memory, total, done = np.zeros(inputs["state"][1] if "state" in inputs else 0), 0.0, False
        while not done:
            rows = (
                {f"obs.{key}": leaf for key, leaf in obs.items()}
                if isinstance(obs, dict)
                else {"obs": obs}
            )
            rows |= {"state": memory, "action_mask": info.get("action_mask")}
            # one observation
            rows = {
                name: np.asarray(rows[name], dtype)[None] for name, (dtype, _) in inputs.items()
            }
            found = dict(zip(outputs, session.run(None, rows), strict=True))
            memory = found["next_state"][0] if "next_state" in found else memory
            obs, reward, terminated, truncated, info = env.step(found["action"][0])
            total, done = total + float(reward), terminated or truncated
        print(f"episode {episode}: return {total:.1f}")
