"""Programs that run inside sandboxes, by the standard library alone, under `python -I -S -B`."""
