"""The Hydra configuration groups: every preset of a run is a file here."""
