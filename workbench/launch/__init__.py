"""From an ablation in YAML to runs on disk: `ablation` plans, `devices` places, `run` starts and watches."""
