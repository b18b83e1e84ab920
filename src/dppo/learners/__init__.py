"""PPO updates, in this process or shared by ranks on Ray."""
