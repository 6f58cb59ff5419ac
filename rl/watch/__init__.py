"""What a run says about itself: numbers on disk and in W&B, the terminal, alarms, curves, and the samples."""
