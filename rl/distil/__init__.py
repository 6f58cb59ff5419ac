"""On-policy distillation as a stage of a run: routes, and what may change while it is going."""
